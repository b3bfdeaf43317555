"""Each example, run as its first lines say, at a small size."""

import contextlib
import importlib.util
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import compiling
import pytest
from waiting import until

from optax_dist import ledger
from optax_dist.coordinator import checkpoint, journal

_HERE = pathlib.Path(__file__).parent
_FOLDER = pathlib.Path(__file__).resolve().parents[2] / "examples"
# Compiling takes longer than these few steps.
_ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu"} | compiling.as_here()


def run(name, *arguments, devices=2):
  """Returns what an example prints."""
  environment = _ENVIRONMENT | {
    "JAX_NUM_CPU_DEVICES": str(devices),
    "PYTHONPATH": str(_FOLDER.parent),
  }
  done = subprocess.run(
    [sys.executable, str(_FOLDER / name), *arguments],
    env=environment,
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


def numbers(pattern, text):
  return [float(result) for result in re.findall(pattern, text)]


def records(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.nightly  # `.ci/run` trains with cross-shard as the main job.
@pytest.mark.parametrize(
  "strategy", ["cross-shard", "sync-replicas", "elastic", "diloco"]
)
def test_digits_example_trains(tmp_path, strategy):
  output = tmp_path / "runs" / "digits"
  flags = ["--strategy", strategy, "--epochs", "3", "--output", str(output)]
  printed = run("digits.py", *flags)
  assert numbers(r"epoch +3 of 3.* accuracy ([\d.]+)%", printed)[0] > 88
  lines = records(output / "metrics.jsonl")
  assert [line["step"] for line in lines] == list(range(1, 67))
  tested = [line["step"] for line in lines if "test_accuracy" in line]
  assert tested == [22, 44, 66]
  assert (output / "training.png").stat().st_size > 10_000


def launched(output, *flags, program):
  """The process of a launched example."""
  name, *arguments = program
  return subprocess.Popen(
    [
      *(sys.executable, "-m", "optax_dist", "launch", "--output", str(output)),
      *(*flags, str(_FOLDER / name), *arguments),
    ],
    env=_ENVIRONMENT | {"JAX_NUM_CPU_DEVICES": "1"},
    cwd=_FOLDER.parent,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def launch(output, *flags, program):
  """Returns what a launched example prints."""
  with launched(output, *flags, program=program) as process:
    printed, errors = process.communicate(timeout=600)
  assert process.returncode == 0, errors
  return printed


def test_launched_digits_resume_from_their_checkpoint(tmp_path):
  program = ["digits_launched.py", "--save-every", "20", "--epochs"]
  flags = ("--replicas", "2", "--chaos", "kill:1@10")
  printed = launch(tmp_path, *flags, program=[*program, "2"])
  assert len(set(re.findall(r"ends at step 44, (\w+)", printed))) == 1
  saved = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
  assert saved == ["step-00000020", "step-00000040", "step-00000044"]
  lost = [r for r in records(tmp_path / "journal.jsonl") if r["kind"] == "lost"]
  assert [r["replica"] for r in lost] == [1]
  # One more epoch.
  flags = ("--replicas", "1", "--resume")
  printed = launch(tmp_path, *flags, program=[*program, "3"])
  assert re.findall(r"joins at step (\d+)", printed) == ["44"]
  assert numbers(r"step 66: test accuracy ([\d.]+)%", printed)[0] > 90
  steps = [r["step"] for r in records(tmp_path / "metrics.jsonl")]
  assert set(steps) == set(range(1, 67))
  assert (tmp_path / "training.png").stat().st_size > 10_000


@pytest.mark.nightly  # docs/test_first_launch.py stops a job, too.
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_launched_digits_save_when_stopped(tmp_path, number):
  program = ["digits_launched.py", "--save-every", "1000000"]
  flags = ("--replicas", "2", "--replicas-to-aggregate", "1")
  path = tmp_path / "journal.jsonl"
  commits = lambda: [
    r for r in journal.read(path).records if r["kind"] == "commit"
  ]
  with launched(tmp_path, *flags, program=program) as process:
    until(lambda: path.exists() and len(commits()) > 20, seconds=300.0)
    process.send_signal(number)
    _, errors = process.communicate(timeout=300)
  assert process.returncode == 128 + number, errors
  last = checkpoint.latest(tmp_path / "checkpoints")
  assert last is not None, errors
  steps = commits()[-1]["step"] + 1
  assert last.name == f"step-{steps:08}"
  # The samples of its steps and no others.
  done = json.loads((last / "progress.json").read_text())
  assert ledger.Progress(
    done["next"], tuple(map(tuple, done["open"]))
  ).done == (64 * steps)


# Three replicas, one of which is killed.
_KILLED = (
  *("--replicas", "3", "--replicas-to-aggregate", "2"),
  *("--chaos", "kill:1@10"),
)


# runs/test_deterministic.py has the bits, and digits_launched.py is launched above.
@pytest.mark.nightly
def test_deterministic_example_ends_with_the_bits_of_one_replica(tmp_path):
  program = ["deterministic.py", "--epochs", "1"]
  alone = launch(tmp_path / "1", "--replicas", "1", program=program)
  output, program = tmp_path / "2", [*program, "--pause", "0.1"]
  with launched(output, "--replicas", "2", program=program) as process:
    # The state would be lost with the only replica that has it.
    path = output / "journal.jsonl"
    result = lambda: journal.read(path).records if path.exists() else []
    together = lambda: [r for r in result() if len(r.get("members", ())) == 2]
    until(together, result, 300.0)
    pids = {r["replica"]: r["pid"] for r in result() if r["kind"] == "process"}
    os.kill(pids[1], signal.SIGKILL)
    printed, errors = process.communicate(timeout=600)
  assert process.returncode == 0, errors
  assert "replica 1 was ended by SIGKILL" in errors
  assert "replica 1 starts again (restart 1 of 10)" in errors
  ends = [
    set(re.findall(r"ends at step 22, (\w+)", text))
    for text in (alone, printed)
  ]
  assert ends[0] == ends[1]
  assert len(ends[0]) == 1


def any_trainer(output, name, *flags, steps, start=subprocess.run, **options):
  """Launches a trainer's example; returns what `start` does."""
  return start(
    [
      *(sys.executable, "-m", "optax_dist", "launch", "--output", str(output)),
      *(*flags, str(_FOLDER / name), "--steps", str(steps), "--pause", "0.05"),
    ],
    env=_ENVIRONMENT | {"JAX_NUM_CPU_DEVICES": "1"},
    cwd=_FOLDER.parent,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    **options,
  )


@pytest.mark.nightly  # The test below has a replica killed, too.
@pytest.mark.parametrize(
  ("name", "needs", "steps"),
  [
    ("any_trainer_nnx.py", "flax", 300),
    ("any_trainer_linen.py", "flax", 300),
    ("any_trainer_tunix.py", "tunix", 900),  # It takes long to import.
    ("any_trainer_numpyro.py", "numpyro", 300),
  ],
)
def test_trainer_example_survives_a_killed_replica(
  tmp_path, name, needs, steps
):
  if importlib.util.find_spec(needs) is None:
    pytest.skip(f"{needs} is not installed")
  done = any_trainer(tmp_path, name, *_KILLED, steps=steps, timeout=600)
  assert done.returncode == 0, done.stderr
  # Replica 1 started twice, and ended with the others' parameters.
  assert len(re.findall(r"process \d+ starts", done.stdout)) == 4
  ended = re.findall(rf"ends at step {steps}, (\w+)", done.stdout)
  assert len(ended) == 3
  assert len(set(ended)) == 1


def test_last_replica_starts_from_its_checkpoint_though_another_stands_by(
  tmp_path,
):
  """What stands by has read the checkpoints before there were any."""
  program = ["launched_k_of_n.py", "--steps", "160", "--save-every", "50"]
  flags = ("--replicas", "1", "--standby", "1", "--chaos", "kill:0@130")
  program += ["--pause", "0.05"]
  printed = launch(tmp_path, *flags, program=program)
  assert re.findall(r"joins at step (\d+)", printed) == ["0", "100"]
  assert not (tmp_path / "checkpoints" / "left").exists()


@pytest.mark.nightly  # tests/cli/launch has processes that stand by.
def test_trainer_checkpoints_go_on_with_a_process_that_stood_by(tmp_path):
  flags = ("--replicas", "2", "--min-replicas", "1", "--chaos", "kill:1@40")
  done = any_trainer(
    tmp_path,
    "any_trainer_nnx.py",
    *(*flags, "--standby", "1"),
    steps=300,
    timeout=600,
  )
  assert done.returncode == 0, done.stderr
  # Two that save to one folder would fail, and hang in orbax's threads.
  assert len(re.findall(r"process \d+ starts", done.stdout)) == 3
  saved = {int(path.name) for path in (tmp_path / "checkpoints").iterdir()}
  assert max(saved) >= 250


def test_trainer_checkpoint_survives_the_whole_job(tmp_path):
  name = "any_trainer_nnx.py"
  flags = ("--replicas", "2", "--min-replicas", "1", "--chaos", "kill:1@10")
  began = any_trainer(
    tmp_path, name, *flags, steps=9999, start=subprocess.Popen
  )
  pids, steps, saved = [], [], tmp_path / "checkpoints" / "100"
  with began:
    while len(pids) < 3:  # Replica 1 starts twice.
      line = began.stdout.readline()
      assert line, "the job has ended"
      for pid, step in re.findall(r"process (\d+) starts at step (\d+)", line):
        pids.append(int(pid))
        steps.append(int(step))
    assert steps[2] > max(steps[:2])  # The run's, not that of a fresh start.
    until(saved.exists, seconds=300.0)
    began.kill()
    for pid in pids:
      with contextlib.suppress(
        ProcessLookupError
      ):  # That of the replica killed.
        os.kill(pid, signal.SIGKILL)
  flags = ["--replicas", "2", "--resume"]
  done = any_trainer(tmp_path, name, *flags, steps=260, timeout=600)
  assert done.returncode == 0, done.stderr
  starts = numbers(r"starts at step (\d+)", done.stdout)
  assert len(starts) == 2
  assert min(starts) >= 100
  assert len(set(re.findall(r"ends at step 260, (\w+)", done.stdout))) == 1
  assert numbers(r"test accuracy ([\d.]+)%", done.stdout)[0] > 85


@pytest.mark.nightly  # The blocks of docs/nnx.md train, too.
def test_nnx_digits_example_trains():
  printed = run("nnx_digits.py", "--epochs", "5")
  assert numbers(r"test accuracy ([\d.]+)", printed)[-1] > 0.85


@pytest.mark.nightly  # The blocks of docs/sharded_models.md train, too.
def test_sharded_transformer_example_trains():
  size = ["--width", "16", "--layers", "1", "--context", "16", "--steps", "20"]
  printed = run("sharded_transformer.py", *size)
  ((params, state),) = re.findall(r"with ([\d,]+) .* and ([\d,]+)", printed)
  # Two moments, of which each of two devices has a half.
  ratio = int(state.replace(",", "")) / int(params.replace(",", ""))
  assert 0.99 < ratio < 1.05
  losses = numbers(r"loss ([\d.]+)", printed)
  assert losses[-1] < losses[0] - 0.5


@pytest.mark.nightly  # tests/coordinator/runs/test_learners.py has such learners.
def test_decoupled_diloco_example_trains():
  printed = run("decoupled_diloco.py", "--steps", "150", devices=1)
  rows = re.findall(r"(\d+) steps, in (\d+) of (\d+) merges", printed)
  steps, merged, _ = zip(*(map(int, row) for row in rows), strict=True)
  # How many steps the others take meanwhile depends on the machine's load.
  assert len(steps) == 4
  assert steps[0] >= 150
  assert merged[0] > 0
  assert numbers(r"parameters: ([\d.]+)", printed)[-1] > 0.9


def test_tensorflow1_port_example_trains():
  printed = run("port_from_tensorflow1.py", "--steps", "100", devices=1)
  assert numbers(r"test accuracy ([\d.]+)", printed)[-1] > 0.8


@pytest.mark.parametrize("path", sorted(_FOLDER.glob("*.py")), ids=str)
def test_each_example_has_its_test(path):
  here = "".join(p.read_text("utf-8") for p in _HERE.glob("test_*.py"))
  # Others are run as on these pages, by the tests of the pages.
  docs = _FOLDER.parent / "docs"
  pages = "".join(
    (docs / name).read_text("utf-8")
    for name in ("first_launch.md", "how_to.md")
  )
  assert f'{path.name}"' in here or f"examples/{path.name} " in pages
