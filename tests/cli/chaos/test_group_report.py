"""The table of kills, of a run that a test plays."""

import pytest

from optax_dist.cli import errors
from optax_dist.cli.chaos import group_cases, group_report, group_run


class Strikes:
  """Stands for `group_run.Strikes`; the fault of seed 2 hangs."""

  compared, at_the_end, pids = 1234, (), ()
  interrupted = None

  def __init__(self, folder, processes):
    self.processes = processes

  def __enter__(self):
    return self

  def __exit__(self, *error):
    pass

  def strike(self, case):
    if case.seed == self.interrupted:
      raise KeyboardInterrupt
    if case.seed == 2:
      return group_run.Result(
        case, seconds=9.0, problems=["hang: no step"], struck=True
      )
    back = dict.fromkeys(group_run.PARTS, 0.5)
    return group_run.Result(
      case, seconds=2.0, struck=True, next_commit=0.25 * case.seed, back=back
    )

  def finish(self):
    return list(self.at_the_end)

  def left(self):
    return list(self.pids)


@pytest.fixture
def strikes(monkeypatch):
  fresh = type("Strikes", (Strikes,), {})
  monkeypatch.setattr(group_run, "Strikes", fresh)
  return fresh


def _rows(out):
  return {
    line.split()[0]: line.split()[1:]
    for line in out.splitlines()
    if line.split() and line.split()[0] in group_cases.PHASES
  }


def test_kills_are_counted_by_phase_and_process(strikes, tmp_path, capsys):
  results, wrong = group_report.run(tmp_path, range(6), 2)
  out = capsys.readouterr().out
  assert not wrong
  assert [r.outcome for r in results] == ["ok", "ok", "hang", *["ok"] * 3]
  assert "seed 2, computing/kill/0.0: hang: no step" in out
  # Joining is of a replica's first process alone.
  assert _rows(out) == {
    "joining": ["1/1", "1/1"],
    "computing": ["0/1", *["1/1"] * 3],
  }
  assert (
    "6 kills in 19 s: 5 ok, 1 hangs, 0 wrong, 0 not struck; 1,234 fingerprints"
  ) in out
  # Of those that came back: seeds 0, 1, 3, 4 and 5.
  line = next(x for x in out.splitlines() if x.startswith("next commit"))
  assert line.endswith("median 0.750 s, longest 1.250 s")
  assert "replica back: median 2.500 s" in out
  assert "  compile: median 0.500 s, longest 0.500 s" in out


def test_without_seeds_the_whole_matrix_is_run(strikes, tmp_path):
  results, _ = group_report.run(tmp_path, None, 2)
  assert len({str(r.case) for r in results}) == len(group_cases.cells(2))


def test_what_is_wrong_besides_is_told(strikes, tmp_path, capsys):
  strikes.at_the_end, strikes.pids = ("diverged: after steps [3]",), (7,)
  _, wrong = group_report.run(tmp_path, range(1), 2)
  assert wrong
  out = capsys.readouterr().out
  assert "the run: diverged: after steps [3]\n" in out
  assert "the run: process 7 is left\n" in out


def test_when_none_comes_back_there_are_no_times(strikes, tmp_path, capsys):
  group_report.run(tmp_path, range(2, 3), 2)
  assert "median" not in capsys.readouterr().out


def test_ctrl_c_says_how_far_it_came(strikes, tmp_path):
  strikes.interrupted = 4
  with pytest.raises(errors.Interrupted, match="after 3 of 5 kills"):
    group_report.run(tmp_path, range(1, 6), 2)
