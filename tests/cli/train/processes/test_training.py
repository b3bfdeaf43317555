"""`optax-dist train --launch processes`, with real processes."""

import json
import logging
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import types

import compiling
import flax.serialization
import matplotlib.image
import pytest
import waiting

from optax_dist.cli import errors, folder_lock, main, parser
from optax_dist.cli.train import command, numbers
from optax_dist.cli.train.processes import checkpoints, plan, training
from optax_dist.coordinator import journal
from optax_dist.coordinator.launch import launcher

_QUICK = ("--batch-size", "96", "--timeout", "120", "--launch", "processes")
_SYNC = ("--strategy", "sync-replicas", "--replicas", "3")
_LEARNERS = ("--strategy", "decoupled-diloco", "--replicas", "3")


@pytest.fixture(autouse=True, scope="module")
def _compiled(tmp_path_factory):
  """What replicas compile, for those of the next test."""
  folder = tmp_path_factory.mktemp("compiled")
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder))
    yield
  assert list(folder.iterdir())  # It was used, as a user's own would be.


@pytest.fixture
def patient(tmp_path_factory, monkeypatch):
  """Has replicas wait for all to join: see `patient_replica`."""
  program = pathlib.Path(__file__).with_name("patient_replica.py")
  helpers = pathlib.Path(waiting.__file__).parent
  folder = tmp_path_factory.mktemp("joined")

  def launch(command, replicas, *, env, **options):
    env |= {
      "PATIENT_FOLDER": str(folder),
      "PATIENT_REPLICAS": str(replicas),
      "PYTHONPATH": os.pathsep.join([str(helpers), *filter(None, sys.path)]),
    }
    return launched(
      [sys.executable, str(program)], replicas, env=env, **options
    )

  launched = launcher.Launcher
  monkeypatch.setattr(launcher, "Launcher", launch)


def _train(folder, *flags):
  return main.main(["train", "--output", str(folder), *_QUICK, *flags])


def _records(folder):
  return journal.read(folder / "journal.jsonl", strict=True).records


def test_it_trains_through_kills_and_stops_and_can_be_replayed(
  tmp_path, capsys, monkeypatch
):
  for name, value in compiling.as_here().items():
    monkeypatch.setenv(name, value)
  flags = ("--replicas-to-aggregate", "2", "--epochs", "4", "--seed", "3")
  chaos = ("--chaos", "kill:0.02,stop:0.01,slow:2x5")
  assert _train(tmp_path, *_SYNC, *flags, *chaos) == 0
  out = capsys.readouterr().out
  assert "replicas hold the same parameters" in out
  records = _records(tmp_path)
  steps = 4 * (1437 // 96)
  commits = [r["step"] for r in records if r["kind"] == "commit"]
  assert commits == list(range(steps))
  # With this seed and these probabilities, some replica dies.
  assert "x kill" in out
  assert any(r["kind"] == "lost" for r in records)
  lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
  metrics = [json.loads(line) for line in lines]
  assert metrics[-1]["step"] == steps
  assert metrics[-1]["test_accuracy"] > 0.8
  assert metrics[-1]["loss"] < metrics[0]["loss"]
  assert matplotlib.image.imread(tmp_path / "training.png").size
  assert main.main(["replay", str(tmp_path / "journal.jsonl")]) == 0
  assert f"identical, {steps} steps" in capsys.readouterr().out


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
  "flags",
  [
    ("elastic-average", "--communication-period", "5"),
    ("diloco", "--communication-period", "7"),
  ],
)
def test_local_strategies_train_between_processes(tmp_path, capsys, flags):
  more = ("--replicas", "2", "--epochs", "1")
  level = logging.getLogger("optax_dist.coordinator").level
  assert _train(tmp_path, "--strategy", *flags, *more) == 0
  # Later trainings in this process see their warnings.
  assert logging.getLogger("optax_dist.coordinator").level == level
  assert "2 replicas hold the same parameters" in capsys.readouterr().out
  commits = [r["step"] for r in _records(tmp_path) if r["kind"] == "commit"]
  assert len(commits) >= (1437 // 96) // int(flags[-1])


@pytest.mark.usefixtures("patient")
def test_learners_go_on_when_one_is_killed(tmp_path, capsys):
  """Of three, one dies at once; all end with the same fragments."""
  flags = ("--strategy", "decoupled-diloco", "--replicas", "3")
  # So few merges can't make up for an overshoot by more momentum.
  momentum = ("--outer-momentum", "0.5", "--alpha", "0.1")
  more = ("--communication-period", "6", "--epochs", "4", *momentum)
  assert _train(tmp_path, *flags, *more, "--chaos", "kill:1@5") == 0
  out = capsys.readouterr().out
  assert "hold the same parameters" in out
  assert "x kill" in out
  records = _records(tmp_path)
  assert 1 in {r["replica"] for r in records if r["kind"] == "lost"}
  commits = [r for r in records if r["kind"] == "commit"]
  assert len(commits) >= 2 * 3 * (1437 // 96) // 6
  for commit in commits:
    weights = [member["weight"] for member in commit["members"]]
    assert len(weights) >= 2
    assert sum(weights) == pytest.approx(len(weights))
  lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
  assert json.loads(lines[-1])["test_accuracy"] > 0.5


def test_when_the_store_is_killed_it_can_be_resumed(tmp_path, capsys):
  command = [sys.executable, "-m", "optax_dist", "train"]
  command += ["--output", str(tmp_path), *_QUICK, *_SYNC]
  # They are not through by the time that they are seen to have saved.
  command += ["--epochs", "9999", "--checkpoint-every", "5"]
  process = subprocess.Popen(
    command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
  )
  try:
    folder = tmp_path / "checkpoints"
    waiting.until(
      lambda: checkpoints.steps(folder) or process.poll() is not None,
      seconds=300.0,
    )
    os.kill(_store_of(process.pid), signal.SIGKILL)
    out, err = process.communicate(timeout=300)
  finally:
    process.kill()
    process.wait()
  assert process.returncode == 1, out + err
  assert "The store of the job" in err
  assert "was ended by SIGKILL" in err
  saved = checkpoints.steps(folder)[-1]
  # Without --resume nothing of it is deleted.
  assert _train(tmp_path, *_SYNC, "--epochs", "1") == 2
  assert "--resume goes on from there" in capsys.readouterr().err
  assert checkpoints.steps(folder)[-1] == saved
  # The newest one was empty when the power failed.
  checkpoints.path_of(folder, saved + 1).touch()
  epochs = saved // (1437 // 96) + 3
  assert _train(tmp_path, *_SYNC, "--epochs", str(epochs), "--resume") == 0
  whole = epochs * (1437 // 96)
  claim = f"{whole - saved} steps after the {saved} of the checkpoint"
  assert claim in capsys.readouterr().out
  parts = journal.segments(journal.read(tmp_path / "journal.jsonl").records)
  assert len(parts) == 2
  assert parts[1][0]["step"] == saved
  commits = [r["step"] for r in parts[1] if r["kind"] == "commit"]
  assert commits == list(range(saved, whole))
  # The ledger's, too.
  assert parts[1][-1]["ledger"]["applied"] == 3 * (whole - saved)
  # The metrics of the steps before the checkpoint are still there.
  lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
  steps = [json.loads(line)["step"] for line in lines]
  assert steps[0] <= saved < steps[-1]
  assert steps == sorted(set(steps))


def test_a_resumed_one_ends_as_one_that_was_not_interrupted(tmp_path, capsys):
  whole, resumed = tmp_path / "whole", tmp_path / "resumed"
  flags = ("--strategy", "sync-replicas", "--replicas", "2", "--epochs", "2")
  assert _train(whole, *flags, "--checkpoint-every", "5") == 0
  (resumed / "checkpoints").mkdir(parents=True)
  saved = checkpoints.path_of(whole / "checkpoints", 15)
  shutil.copy(saved, resumed / "checkpoints")
  shutil.copy(whole / "journal.jsonl", resumed)
  assert _train(resumed, *flags, "--checkpoint-every", "5", "--resume") == 0
  told = capsys.readouterr()
  assert "steps after the 15 of the checkpoint" in told.out
  prints = re.findall(r"fingerprint (\S+)", told.out)
  assert len(prints) == 2
  assert prints[0] == prints[1]
  assert "other flags" not in told.err


def test_sigterm_says_how_to_go_on(tmp_path):
  command = [sys.executable, "-m", "optax_dist", "train"]
  command += ["--output", str(tmp_path), *_QUICK, *_SYNC, "--epochs", "9999"]
  process = subprocess.Popen(
    [*command, "--checkpoint-every", "5"], stderr=subprocess.PIPE, text=True
  )
  try:
    folder = tmp_path / "checkpoints"
    waiting.until(
      lambda: checkpoints.steps(folder) or process.poll() is not None,
      seconds=300.0,
    )
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
  finally:
    process.kill()
    process.wait()
  assert process.returncode == 143, err
  assert f"--resume goes on from the last checkpoint in {tmp_path}" in err


def test_without_a_checkpoint_nobody_is_told_to_resume(tmp_path):
  assert training._how_to_go_on(tmp_path) == (
    "there is no checkpoint yet to go on from"
  )


def _resume(tmp_path, before, after):
  """Resumes with flags after a run with others."""

  def config(flags):
    root = parser.Parser(prog="optax-dist")
    argv = ["train", *_QUICK, *_SYNC, *flags]
    command.add_parser(root.add_subparsers(), argv)
    args = root.parse_args(argv)
    args.learning_rate = args.learning_rate or 0.1
    return plan.make(args, 1437)

  path = tmp_path / "journal.jsonl"
  with journal.Journal(path) as file:
    for flags in (("--seed", "7"), before):  # The last one counts.
      told = config(flags)
      file.write("run", strategy="sync_replicas", step=0, config=told)
  training._check_resumed(config(after), path)


def test_other_flags_than_before_are_told(tmp_path, capsys):
  _resume(tmp_path, (), ())
  assert capsys.readouterr().err == ""
  flags = ("--epochs", "3", "--learning-rate", "0.5", "--batch-size", "48")
  _resume(tmp_path, (), flags)
  assert capsys.readouterr().err == (
    "optax-dist: resumes with other flags: --learning-rate 0.5 (before: 0.1),"
    " --epochs 3 (before: 20), --batch-size 48 (before: 96)\n"
  )


def test_the_state_of_another_optimizer_is_of_no_use(tmp_path):
  with pytest.raises(errors.CommandError, match="give --optimizer adam, or"):
    _resume(tmp_path, (), ("--optimizer", "momentum"))


def test_a_checkpoint_that_can_not_be_read_is_named(tmp_path, capsys):
  path = checkpoints.path_of(tmp_path / "checkpoints", 50)
  path.mkdir(parents=True)
  assert _train(tmp_path, *_SYNC, "--resume") == 2
  assert f"{path} can't be read: Is a directory" in capsys.readouterr().err


def _store_of(pid):
  for name in os.listdir("/proc"):
    if name.isdecimal():
      try:
        stat = pathlib.Path(f"/proc/{name}/stat").read_text()
        command = pathlib.Path(f"/proc/{name}/cmdline").read_bytes()
      except OSError:
        continue
      parent = int(stat.rpartition(")")[2].split()[1])
      if parent == pid and b"optax_dist.coordinator.store" in command:
        return int(name)
  raise AssertionError("no store")


@pytest.mark.parametrize(
  ("flags", "words"),
  [
    (("--strategy", "cross-shard"), "with --launch processes take"),
    ((*_SYNC, "--straggler", "1:0.5"), "--straggler does not go with"),
    ((*_SYNC, "--chaos", "slow:7x2"), "numbered 0 to 2"),
    ((*_SYNC, "--chaos", "melt:0.5"), "must be kill:P, stop:P"),
    ((*_SYNC, "--resume"), "there is no checkpoint"),
    ((*_LEARNERS, "--alpha", "1"), "--alpha must be below 1"),
    ((*_LEARNERS, "--outer-momentum", "1"), "--outer-momentum must be below"),
    ((*_LEARNERS, "--fragments", "30"), "at least --fragments 30"),
    ((*_LEARNERS, "--replicas-to-aggregate", "4"), "at most the 3 replicas"),
  ],
)
def test_what_can_not_work_is_told_at_once(tmp_path, capsys, flags, words):
  assert _train(tmp_path / "run", *flags) == 2
  assert words in capsys.readouterr().err
  assert list(tmp_path.iterdir()) == []


def test_two_at_once_in_one_folder_are_refused(tmp_path, capsys):
  with folder_lock.held(tmp_path):
    assert _train(tmp_path, *_SYNC, "--resume") == 2
  told = f"--output {tmp_path} is in use by process {os.getpid()} on "
  assert told in capsys.readouterr().err


def test_what_is_refused_leaves_the_metrics_so_far(tmp_path, capsys):
  saved = checkpoints.path_of(tmp_path / "checkpoints", 50)
  saved.parent.mkdir()
  state = {"params": 1, "opt_state": 2, "step": 50}
  saved.write_bytes(flax.serialization.to_bytes(state))
  (tmp_path / "metrics.jsonl").write_text('{"step": 50}\n')
  flags = ("--resume", "--tensorboard", str(saved / "below"))
  assert _train(tmp_path, *_SYNC, *flags) == 2
  assert "--tensorboard: Not a directory" in capsys.readouterr().err
  assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 50}\n'


def test_learners_need_processes(tmp_path, capsys):
  argv = ["train", "--output", str(tmp_path), *_LEARNERS, *_QUICK[:2]]
  assert main.main(argv) == 2
  assert "needs --launch processes" in capsys.readouterr().err


def test_chaos_needs_processes(tmp_path, capsys):
  flags = ["train", "--output", str(tmp_path), "--chaos", "kill:0.1"]
  assert main.main(flags) == 2
  assert "--chaos needs --launch processes" in capsys.readouterr().err


def test_the_pace_is_by_the_clock_of_the_journal(tmp_path):
  path = tmp_path / "journal.jsonl"
  with journal.Journal(path) as written:
    for at in (100.0, 2.0):  # The second run counts.
      written.write("run", strategy="sync_replicas", step=0)
      for step in range(4):
        written.write(
          "commit", step=step, attempt=1, members=[], time=at * (step + 1)
        )
      written.write("finish", step=4, reason="finished", time=99.0 + at)
  assert training._seconds(path) == 8.0


def test_an_epoch_is_evaluated_once():
  """Also where a replica that is late reports it again at a later step."""
  config = {
    "local_steps": 40,
    "steps_per_epoch": 10,
    "commits": 40,
    "batch_size": 8,
  }
  lines = types.SimpleNamespace(write=lambda record: None)
  latest = numbers.TrainingNumbers()
  collected = training._Collected(config, lines, [], latest)
  step = {"event": "step", "accepted": True, "loss": 1.0}
  evaluations = {10: 0.5, 17: 0.1, 20: 0.6, 24: 0.2}
  for number in range(1, 26):
    accuracy = (
      {"accuracy": evaluations[number]} if number in evaluations else {}
    )
    collected.take(0, step | {"step": number} | accuracy)
  collected.flush()
  found = {r["step"]: r.get("test_accuracy") for r in collected.records}
  assert {s: a for s, a in found.items() if a is not None} == {10: 0.5, 20: 0.6}
  reported = {one.name: one.samples[0].value for one in latest.metrics()}
  assert reported["training_step"] == 25
  assert reported["training_test_accuracy"] == 0.6
