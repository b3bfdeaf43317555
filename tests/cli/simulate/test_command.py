"""``optax-dist simulate``, as a user meets it."""

import json
import os

import pytest

from optax_dist.cli import main


def test_all_strategies_in_one_table(tmp_path, capsys):
  figures, image = tmp_path / "out.json", tmp_path / "out.png"
  argv = ["simulate", "--latency", "slow-hosts:0.25,3,gamma:4,0.25"]
  argv += ["--replicas", "8", "--backups", "0", "2", "--steps", "200"]
  argv += ["--communication", "0.1", "--json", str(figures)]
  assert main.main([*argv, "--save", str(image)]) == 0
  printed = capsys.readouterr().out
  for name in ("sync, 0 backups", "sync, 2 backups", "asynchronous", "elastic"):
    assert name in printed
  assert image.read_bytes().startswith(b"\x89PNG")
  simulations = json.loads(figures.read_text())["simulations"]
  assert len(simulations) == 6
  of = {s["strategy"]["name"]: s for s in simulations}
  assert (
    of["sync, 2 backups"]["steps_per_second"]
    > (of["sync, 0 backups"]["steps_per_second"])
  )
  # The same number of gradients for each.
  assert sum(of["asynchronous"]["per_replica"]["applied"]) == 1600
  before = figures.read_bytes()
  assert main.main(argv) == 0
  assert figures.read_bytes() == before


def test_a_written_journal_is_simulated_again(tmp_path, capsys):
  path = str(tmp_path / "run.jsonl")
  argv = ["simulate", "--latency", "gamma:4,0.25", "--replicas", "5"]
  argv += ["--strategy", "sync", "--backups", "1", "--steps", "500"]
  argv += ["--write-journal", path]
  assert main.main(argv) == 0
  # A second time the journal is a new one.
  assert main.main(argv) == 0
  capsys.readouterr()
  with open(path, "a") as file:
    file.write("{not JSON\n")
  assert main.main(["simulate", "--journal", path, "--steps", "500"]) == 0
  captured = capsys.readouterr()
  assert "recorded: sync, 4 of N" in captured.out
  assert "; predicted: " in captured.out
  assert "held out: the first half predicts" in captured.out
  bad, rest, doubt = captured.err.splitlines()
  assert "no timings" in doubt
  assert "run.jsonl: line " in bad
  assert "not JSON" in bad
  assert "going on with the other" in rest


_RECORDED = ["simulate", "--latency", "constant:1", "--strategy", "sync"]
_RECORDED += ["--steps", "9", "--replicas", "2", "--write-journal"]


def test_a_journal_takes_the_place_of_no_pipe_or_device(tmp_path, capsys):
  pipe = tmp_path / "pipe"
  os.mkfifo(pipe)
  (tmp_path / "link").symlink_to(pipe)
  for path in (pipe, tmp_path / "link"):
    assert main.main([*_RECORDED, str(path)]) == 2
    assert "A journal is a regular file" in capsys.readouterr().err
  assert pipe.is_fifo()
  assert (tmp_path / "link").is_symlink()


def test_a_journal_is_written_to_what_a_link_names(tmp_path):
  real, link = tmp_path / "real", tmp_path / "link"
  real.write_text("{a torn line")
  link.symlink_to(real)
  assert main.main([*_RECORDED, str(link)]) == 0
  assert link.is_symlink()
  assert json.loads(real.read_text().splitlines()[0])["kind"] == "run"


def test_failures_are_simulated(capsys):
  argv = ["simulate", "--latency", "constant:1", "--strategy", "sync"]
  assert main.main([*argv, "--steps", "200", "--failures", "0.05,4"]) == 0
  assert "recovery" in capsys.readouterr().out


@pytest.mark.parametrize(
  ("more", "said"),
  [
    (["--latency", "weibull:1"], "--latency: a latency is one of constant:t"),
    (["--latency", "constant:-1"], "must be a finite number above 0, got -1"),
    ([], "one of the arguments --latency --journal is required"),
    (["--journal", "nowhere.jsonl"], "--journal nowhere.jsonl: can't be read"),
    (["--journal", "empty.jsonl"], "no line of it can be used"),
    (["--journal", "alone.jsonl"], "no times of computing"),
    (["--latency", "constant:1", "--backups", "8"], "leaves none of --repl"),
    (["--latency", "constant:1", "--failures", "1"], "must be RATE,DOWNTIME"),
    (["--latency", "constant:1", "--failures", "1,0"], "above 0, got '0'"),
    (["--latency", "constant:1", "--save", "no/x.png"], "no directory no"),
    (["--latency", "constant:1", "--json", "."], "can't write ."),
    (["--latency", "constant:1", "--write-journal", "x"], "one strategy"),
  ],
)
def test_what_cannot_be_done_is_one_line(
  more, said, capsys, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "empty.jsonl").write_text("")
  (tmp_path / "alone.jsonl").write_text(
    '{"kind": "run", "time": 0, "version": 1, "strategy": "x", "step": 0}\n'
  )
  assert main.main(["simulate", "--steps", "1", *more]) == 2
  last = capsys.readouterr().err.splitlines()[-1]
  assert said in last


def test_a_network_learns_in_virtual_time(tmp_path, capsys):
  figures, image = tmp_path / "out.json", tmp_path / "out.png"
  argv = ["simulate", "--train", "--latency", "gamma:4,0.25"]
  argv += ["--replicas", "4", "--strategy", "async", "--seconds", "60"]
  assert main.main([*argv, "--json", str(figures), "--save", str(image)]) == 0
  assert "asynchronous" in capsys.readouterr().out
  (training,) = json.loads(figures.read_text())["trainings"]
  accuracy = training["metrics"]["accuracy"]
  assert accuracy[0] < 0.3 < 0.6 < accuracy[-1]
  assert len(accuracy) == len(training["seconds"]) == len(training["steps"])
  assert image.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
  ("more", "said"),
  [
    (["--write-journal", "x"], "does not go with --train"),
    (["--latency", "pareto:1,0.9"], "has no mean, so --train needs --seconds"),
    (
      ["--strategy", "local-updates", "--failures", "0.1,1"],
      "backups and failures must be none",
    ),
  ],
)
def test_what_cannot_be_trained_is_one_line(more, said, capsys):
  latency = [] if "--latency" in more else ["--latency", "constant:1"]
  assert main.main(["simulate", "--train", *latency, *more]) == 2
  assert said in capsys.readouterr().err.splitlines()[-1]
