"""The main job, from flags to files."""

import json
import os
import signal
import subprocess
import sys
import time

import dropped_signals
import matplotlib.image
import pytest

from optax_dist.cli import main
from optax_dist.cli.train import digits, loop, metrics

_COMMAND = (sys.executable, "-W", "error", "-m", "optax_dist")
_STEPS_PER_EPOCH = digits.TRAIN_SIZE // 64


def _records(directory):
  text = (directory / "metrics.jsonl").read_text()
  return [json.loads(line) for line in text.splitlines()]


def _untimed(records):
  return [
    {k: v for k, v in record.items() if k != "samples_per_second"}
    for record in records
  ]


def _train(directory, *flags):
  return main.main(["train", "--output", str(directory), *flags])


def test_files_and_numbers_of_a_run(tmp_path, capsys):
  first, again = tmp_path / "first", tmp_path / "again"
  assert _train(first, "--epochs", "2", "--seed", "7") == 0
  out = capsys.readouterr().out
  records = _records(first)
  assert [r["step"] for r in records] == list(
    range(1, 2 * _STEPS_PER_EPOCH + 1)
  )
  for record in records:
    ends_epoch = record["step"] % _STEPS_PER_EPOCH == 0
    assert list(record) == [
      "step",
      "epoch",
      "loss",
      "samples_per_second",
      *(["test_accuracy"] if ends_epoch else []),
    ]
    assert record["epoch"] == (record["step"] - 1) // _STEPS_PER_EPOCH + 1
    assert record["samples_per_second"] > 0
  assert records[-1]["loss"] < records[0]["loss"]
  # Ten digits: what has learned nothing gets a tenth right.
  accuracy = records[-1]["test_accuracy"]
  assert accuracy > 0.5

  assert matplotlib.image.imread(first / "training.png").size
  last_line = out.splitlines()[-1]
  assert f"test accuracy {accuracy:.1%}" in last_line
  assert str(first / "metrics.jsonl") in last_line
  assert str(first / "training.png") in last_line

  # The same seed gives the same numbers, to the last bit.
  assert _train(again, "--epochs", "2", "--seed", "7") == 0
  assert _untimed(_records(again)) == _untimed(records)


def test_the_main_job_reaches_97_percent_from_a_cold_start(tmp_path):
  done = subprocess.run(
    [*_COMMAND, "train", "--output", tmp_path],
    capture_output=True,
    text=True,
    timeout=600,
  )
  assert done.returncode == 0, done.stderr
  assert "8 replicas on CPU" in done.stdout
  assert _records(tmp_path)[-1]["test_accuracy"] >= 0.97


# Python leaves Ctrl-C ignored where its parent ignores it, as shells' background
# jobs do.
_WITH_CTRL_C = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from optax_dist.cli import main
sys.exit(main.main(sys.argv[1:]))
"""


def test_ctrl_c_keeps_the_metrics_so_far(tmp_path):
  command = [sys.executable, "-W", "error", "-c", _WITH_CTRL_C, "train"]
  with subprocess.Popen(
    [*command, "--output", tmp_path, "--epochs", "9999"],
    stderr=subprocess.PIPE,
    text=True,
  ) as process:
    try:
      deadline = time.monotonic() + 300
      path = tmp_path / "metrics.jsonl"
      while not (path.exists() and path.read_text().count("\n") > 3):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.1)
      process.send_signal(signal.SIGINT)
      _, err = process.communicate(timeout=300)
    finally:
      process.kill()
  assert process.returncode == 130
  assert "Traceback" not in err
  steps = _records(tmp_path)[-1]["step"]
  assert err.splitlines()[-1].startswith(
    f"optax-dist: interrupted after step {steps} of "
  )


@pytest.mark.parametrize(
  ("flags", "said"),
  [
    ("--strategy telepathy", "'telepathy' (choose from"),
    ("--replicas 0", "--replicas: must be a whole number of at least 1"),
    ("--replicas two", "'two'"),
    ("--replicas 5", "--replicas 5 does not divide --batch-size 64"),
    ("--replicas 16", "--replicas 16 is more than the 8 cpu device"),
    ("--epochs -1", "--epochs: must be a whole number of at least 1"),
    ("--batch-size 0", "--batch-size: must be"),
    ("--batch-size 1438", "more than the 1437 training images"),
    ("--seed -1", "--seed: must be a whole number from 0"),
    ("--seed 4294967296", "--seed: must be a whole number from 0"),
    ("--learning-rate 0", "--learning-rate: must be a finite number above 0"),
    ("--learning-rate nan", "'nan'"),
    ("--learning-rate inf", "'inf'"),
    ("--optimizer adma", "'adma' is not one of adadelta, "),
    ("--reduction max", "'max' (choose from"),
    ("--output {}/file", "it is a file, not a directory"),
    ("--output {}/file/below", "can't be written"),
  ],
)
def test_wrong_flags_are_one_line_and_leave_old_results(
  tmp_path, capsys, flags, said
):
  (tmp_path / "file").write_text("")
  old = tmp_path / "metrics.jsonl"
  old.write_text("old")
  assert _train(tmp_path, *flags.format(tmp_path).split()) == 2
  captured = capsys.readouterr()
  assert not captured.out
  assert captured.err.count("\n") == 1
  assert said in captured.err
  assert old.read_text() == "old"


def test_what_is_refused_leaves_no_folder(tmp_path, capsys):
  assert _train(tmp_path / "new" / "run", "--replicas", "16") == 2
  assert "more than the 8 cpu device" in capsys.readouterr().err
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
  ("module", "name"), [("flax", "flax"), ("sklearn", "scikit-learn")]
)
def test_a_missing_extra_is_named(tmp_path, monkeypatch, capsys, module, name):
  monkeypatch.setitem(sys.modules, module, None)  # As if not installed.
  assert _train(tmp_path / "run") == 2
  err = capsys.readouterr().err
  assert err.count("\n") == 1
  assert f"{name} not installed" in err
  assert 'pip install "optax-dist[train]"' in err


@pytest.mark.parametrize("when", ["dropped by Python", "line written"])
def test_ctrl_c_tells_the_last_step_in_the_file(
  tmp_path, monkeypatch, capsys, when
):
  write = metrics.JsonLines.write

  def train(*args, **options):
    for step in range(1, 10):
      if step == 3 and when == "dropped by Python":
        dropped_signals.come(signal.SIGINT, monkeypatch)
      numbers = {"loss": 1.0, "samples_per_second": 1.0}
      yield {"step": step, "epoch": 1, **numbers}

  def write_line(self, record):
    write(self, record)
    if record["step"] == 3 and when == "line written":
      os.kill(os.getpid(), signal.SIGINT)

  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  monkeypatch.setattr(loop, "compile_program", lambda *_, **__: None)
  monkeypatch.setattr(loop, "train", train)
  monkeypatch.setattr(metrics.JsonLines, "write", write_line)
  try:
    assert _train(tmp_path) == 130
  finally:
    signal.signal(signal.SIGINT, before)
  assert "interrupted after step 3 of" in capsys.readouterr().err
  assert len(_records(tmp_path)) == 3


def test_ctrl_c_while_importing_is_one_line(tmp_path, monkeypatch, capsys):
  def interrupt(*args):
    raise KeyboardInterrupt

  monkeypatch.setattr(metrics.JsonLines, "__init__", interrupt)
  assert _train(tmp_path) == 130
  assert capsys.readouterr().err == "optax-dist: interrupted\n"
