"""``optax-dist plan``, as a user meets it."""

import json

import pytest

from optax_dist.cli import main


def test_a_plan_is_recommended_and_drawn(tmp_path, capsys):
  figures, image = tmp_path / "plan.json", tmp_path / "plan.png"
  argv = ["plan", "--latency", "bernoulli:1,10,0.05", "--replicas", "8"]
  argv += ["--steps", "50", "--repetitions", "20"]
  argv += ["--json", str(figures), "--save", str(image)]
  assert main.main(argv) == 0
  printed = capsys.readouterr().out
  report = json.loads(figures.read_text())
  best = report["recommended"]["replicas_to_aggregate"]
  assert f"recommended: replicas_to_aggregate={best} of 8" in printed
  assert "of 20 repetitions simulated" in printed
  assert report["reason"] in printed
  second = report["runner_up"]["replicas_to_aggregate"]
  assert f"runner-up: {second} of 8" in printed
  assert len(report["candidates"]) == 8
  assert image.read_bytes().startswith(b"\x89PNG")


def test_from_a_journal_it_is_a_bootstrap(tmp_path, capsys):
  path = str(tmp_path / "run.jsonl")
  argv = ["simulate", "--latency", "gamma:4,0.25", "--replicas", "3"]
  argv += ["--strategy", "sync", "--steps", "50", "--write-journal", path]
  assert main.main(argv) == 0
  argv = ["plan", "--journal", path, "--replicas", "40", "--noise-scale", "inf"]
  assert main.main([*argv, "--steps", "5", "--repetitions", "20"]) == 0
  printed = capsys.readouterr().out
  assert "drawn from the recorded times" in printed
  assert "counts gradients" in printed
  rows = [line for line in printed.splitlines() if " to " in line]
  assert len(rows) < 25


def test_what_a_journal_cannot_know_is_told(tmp_path, capsys):
  path = str(tmp_path / "run.jsonl")
  argv = [
    "simulate",
    "--latency",
    "gamma:4,0.25",
    "--replicas",
    "4",
    "--cancel",
  ]
  argv += ["--strategy", "sync", "--backups", "1", "--steps", "50"]
  assert main.main([*argv, "--write-journal", path]) == 0
  argv = ["plan", "--journal", path, "--steps", "5", "--repetitions", "20"]
  assert main.main(argv) == 0
  assert "slow computations are missing" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("more", "said"),
  [
    (["--latency", "gamma:1"], "gamma takes 2 numbers, gamma:shape,scale"),
    (["--latency", "constant:1", "--noise-scale", "-1"], "got '-1'"),
    (["--journal", "elastic.jsonl"], "it is of elastic averaging"),
  ],
)
def test_what_cannot_be_done_is_one_line(
  more, said, capsys, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  lines = [
    {"kind": "run", "version": 1, "strategy": "elastic_average"},
    {"kind": "exchange", "replica": 0, "local_step": 1, "compute": 1.0},
  ]
  (tmp_path / "elastic.jsonl").write_text(
    "\n".join(json.dumps(line | {"time": 0, "step": 0}) for line in lines)
  )
  assert main.main(["plan", *more]) == 2
  assert said in capsys.readouterr().err.splitlines()[-1]
