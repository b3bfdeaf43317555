"""``optax-dist simulate`` and ``plan``, as a user meets them."""

import json
import re

import pytest

from optax_dist import simulate
from optax_dist.cli import main
from optax_dist.coordinator import journal


def _recorded(path, steps=300, n=4, k=3, **options):
  """Writes the journal of a simulation."""
  with journal.Journal(path) as writer:
    simulate.simulate_timing(
      simulate.sync_replicas(k, cancel=options.pop("cancel", False)),
      simulate.parse_latency("gamma:4,0.25"),
      n,
      steps=steps,
      journal=writer,
      **options,
    )
  return str(path)


def _row(printed, name):
  """The cells of a row of the table."""
  (line,) = (x for x in printed.splitlines() if x.strip().startswith(name))
  return re.split(r"\s{2,}", line.strip())


def test_backups_make_steps_faster_and_drop_gradients(capsys):
  argv = ["simulate", "--latency", "slow-hosts:0.25,3,gamma:4,0.25"]
  argv += ["--replicas", "8", "--steps", "200", "--communication", "0.1"]
  assert main.main(argv) == 0
  printed = capsys.readouterr().out
  assert "8 replicas, steps of 8 gradients, slow-hosts" in printed
  assert "exchanging" in printed
  assert main.main([*argv, "--backups", "2"]) == 0
  two = capsys.readouterr().out
  pace = lambda printed: float(_row(printed, "steps/s")[1])
  assert pace(two) > pace(printed)
  assert _row(printed, "gradients dropped")[1] == "0.0%"
  assert _row(two, "gradients dropped")[1] != "0.0%"
  assert main.main(argv) == 0
  assert capsys.readouterr().out == printed


def test_journal_is_predicted_within_ten_percent(tmp_path, capsys):
  path = _recorded(tmp_path / "run.jsonl")
  with open(path, "a") as file:
    file.write("{not JSON\n")
  argv = ["simulate", "--journal", path, "--steps", "300"]
  assert main.main(argv) == 0
  captured = capsys.readouterr()
  assert "4 replicas, steps of 3 gradients" in captured.out
  assert "; predicted: " in captured.out
  bad, rest = captured.err.splitlines()
  assert "run.jsonl: line " in bad
  assert "not JSON" in bad
  assert "going on with the other" in rest
  *_, line = captured.out.splitlines()
  assert abs(float(re.search(r"([+-][\d.]+)%$", line)[1])) < 10
  # Another number of gradients has a prediction, and nothing to compare with.
  assert main.main([*argv, "--backups", "0"]) == 0
  last = capsys.readouterr().out.splitlines()[-1]
  assert "; predicted: " in last
  assert not last.endswith("%")


@pytest.mark.parametrize(
  "more",
  [
    ["--backups", "0", "--failures", "0.02,8"],
    pytest.param(["--backups", "0"], marks=pytest.mark.nightly),
  ],
)
def test_prediction_has_the_failures_of_the_simulation(tmp_path, capsys, more):
  """The journal's failures are not used, nor is a given rate estimated."""
  path = _recorded(
    tmp_path / "run.jsonl",
    steps=600,
    k=4,
    failures=simulate.Failures(0.05, (8.0,)),
  )
  argv = ["simulate", "--journal", path, "--steps", "300", *more]
  assert main.main(argv) == 0
  printed = capsys.readouterr().out
  pace = float(_row(printed, "steps/s")[1])
  predicted, low, high = map(
    float, re.search(r"predicted: (\S+) .*: (\S+) to (\S+)\)", printed).groups()
  )
  assert predicted == pytest.approx(pace, rel=0.2)
  assert high < 2 * low


def test_time_of_failures_is_in_the_table(capsys):
  argv = ["simulate", "--latency", "constant:1"]
  assert main.main([*argv, "--steps", "200", "--failures", "0.05,4"]) == 0
  printed = capsys.readouterr().out
  assert re.search(r"time recovery +[1-9]\d\.\d%", printed)
  assert "stopped" not in printed


def test_simulation_that_stopped_early_is_reported(capsys):
  argv = ["simulate", "--latency", "constant:1", "--replicas", "2"]
  argv += ["--failures", "0.01,inf", "--steps", "20000"]
  assert main.main(argv) == 1
  assert re.match(
    r"stopped after [\d,]+ of 20,000 steps: too few replicas were left",
    capsys.readouterr().out,
  )


def test_journal_that_tells_too_little_gives_no_number(tmp_path, capsys):
  """Two kills, and a machine on which programs slow each other."""
  path = _recorded(
    tmp_path / "run.jsonl", k=4, failures=simulate.Failures(0.002, (8.0,))
  )
  with open(path) as file:
    records = [json.loads(line) for line in file]
  records[0]["cores"] = 2
  end = {"kind": "finish", "time": records[-1]["time"], "step": 300, "load": 9}
  with open(path, "w") as file:
    file.writelines(json.dumps(r) + "\n" for r in [*records, end])
  for more in ([], ["--backups", "1"]):
    assert main.main(["simulate", "--journal", path, *more]) == 1
    said = capsys.readouterr()
    assert "a load of 9.0 on 2 cores" in said.err
    assert ("too few failures" in said.err) == (not more)
    (line,) = said.out.splitlines()
    assert re.fullmatch(
      r"recorded: [\d.]+ steps/s; no prediction, for the reasons above", line
    )


@pytest.mark.parametrize(
  ("more", "said"),
  [
    (["--latency", "weibull:1"], "--latency: a latency is one of constant:t"),
    (["--latency", "constant:-1"], "must be a finite number above 0, got -1"),
    ([], "one of the arguments --latency --journal is required"),
    (["--journal", "nowhere.jsonl"], "--journal nowhere.jsonl: can't be read"),
    (["--journal", "empty.jsonl"], "nothing has been written to this"),
    (["--journal", "alone.jsonl"], "no times of computing"),
    (["--latency", "constant:1", "--backups", "8"], "leaves none of --repl"),
    (["--latency", "constant:1", "--failures", "1"], "must be RATE,DOWNTIME"),
    (["--latency", "constant:1", "--failures", "1,0"], "above 0, got '0'"),
    (
      ["--latency", "constant:9", "--failures", "99,inf"],
      "simulate: no step is ever taken",
    ),
  ],
)
def test_error_is_one_line(more, said, capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "empty.jsonl").write_text("")
  (tmp_path / "alone.jsonl").write_text(
    '{"kind": "run", "time": 0, "version": 1, "strategy": "x", "step": 0}\n'
  )
  assert main.main(["simulate", "--steps", "1", *more]) == 2
  assert said in capsys.readouterr().err.splitlines()[-1]


def test_plan_has_a_recommendation_and_a_reason(capsys):
  argv = ["plan", "--latency", "bernoulli:1,10,0.05", "--replicas", "8"]
  argv += ["--steps", "50"]
  assert main.main(argv) == 0
  printed = capsys.readouterr().out
  best, second = re.search(r"reason: k = (\d+): .* k = (\d+)", printed).groups()
  assert f"recommended: replicas_to_aggregate={best} of 8" in printed
  assert f"runner-up: k = {second} of 8" in printed
  assert f"reason: k = {best}: each step makes " in printed
  assert f" steps/s, than k = {second}\n" in printed
  assert "of 20 repetitions, simulated" in printed
  assert all(_row(printed, f"{k} ")[0] == str(k) for k in range(1, 8))


def test_plan_resamples_a_journal(tmp_path, capsys):
  path = _recorded(tmp_path / "run.jsonl", steps=300, k=4, cancel=True)
  argv = ["plan", "--journal", path, "--replicas", "8", "--noise-scale", "inf"]
  assert main.main([*argv, "--steps", "5", "--repetitions", "4"]) == 0
  captured = capsys.readouterr()
  assert "resampled from the recorded times" in captured.out
  assert "each gradient counts the same" in captured.out


def test_plan_says_that_it_leaves_failures_out(tmp_path, capsys):
  failures = simulate.Failures(0.01, (2.0,))
  path = _recorded(tmp_path / "run.jsonl", steps=300, failures=failures)
  argv = ["plan", "--journal", path, "--steps", "5", "--repetitions", "2"]
  assert main.main(argv) == 0
  last = capsys.readouterr().out.splitlines()[-1]
  assert re.match(r"not in it: what the \d+ recorded losses of replicas", last)


def test_plan_says_what_a_journal_cannot_know(tmp_path, capsys):
  path = _recorded(tmp_path / "run.jsonl", steps=50, cancel=True)
  argv = ["plan", "--journal", path, "--steps", "5", "--repetitions", "2"]
  assert main.main(argv) == 1
  captured = capsys.readouterr()
  assert "slow computations are missing" in captured.err
  assert captured.out == "no recommendation, for the reasons above\n"


def test_plan_of_a_short_journal_has_no_table(tmp_path, capsys):
  path = _recorded(tmp_path / "run.jsonl", steps=5, k=4)
  printed = []
  for command in ("plan", "simulate"):
    assert main.main([command, "--journal", path]) == 1
    captured = capsys.readouterr()
    assert "too short: 4 steps tell the pace to " in captured.err
    printed.append(captured.out)
  assert printed[0] == "no recommendation, for the reasons above\n"
  assert len(printed[1].splitlines()) == 1


@pytest.mark.parametrize(
  ("more", "said"),
  [
    (["--latency", "gamma:1"], "gamma takes 2 numbers, gamma:shape,scale"),
    (["--latency", "constant:1", "--noise-scale", "-1"], "got '-1'"),
    (["--journal", "elastic.jsonl"], "it is of elastic averaging"),
  ],
)
def test_error_of_plan_is_one_line(more, said, capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  lines = [
    {"kind": "run", "version": 1, "strategy": "elastic_average"},
    {
      "kind": "drop",
      "replica": 0,
      "local_step": 1,
      "count": 1,
      "reason": "stale",
    }
    | {"compute": 1.0},
  ]
  (tmp_path / "elastic.jsonl").write_text(
    "\n".join(json.dumps(line | {"time": 0, "step": 0}) for line in lines)
  )
  assert main.main(["plan", *more]) == 2
  assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_times_beyond_all_numbers_are_an_error_of_the_command(command, capsys):
  argv = [command, "--latency", "gamma:1e-300,1", "--replicas", "2"]
  assert main.main(argv) == 2
  assert f"{command}: the times of gamma:1e-300,1" in capsys.readouterr().err
