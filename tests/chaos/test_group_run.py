"""Kills in a run of replicas with several processes, which a test plays."""

import collections
import itertools
import json
import time

import pytest

from tests.chaos import group_run, groups, pool


class Child:
  """Stands for a `child.Child`: it knows the order that it got last."""

  def __init__(self):
    self.armed = None

  def send(self, message):
    if message["do"] == "arm":
      self.armed = message


class Groups:
  """Stands for `groups.Groups`: each look is a step of those that are there."""

  hangs = False

  def __init__(self, folder, replicas, processes, *, target, pause, join):
    self.folder, self.processes = folder, processes
    self.token = f"token {id(self)}"
    self.journal = join["journal"]
    self.everyone, self.live, self.log = [], {}, []
    self.restarts, self.clock = True, itertools.count(1)
    self.leader = None

  def __enter__(self):
    return self

  def __exit__(self, *error):
    self.log.append("end")

  def start(self, replica, faults=None):
    self.log.append(f"start {replica}" + (f" {faults}" if faults else ""))
    group = [
      groups.Process(Child(), replica, rank, len(self.everyone))
      for rank in range(self.processes)
    ]
    for rank, fault in (faults or {}).items():
      group[rank].process.armed = fault
    times = {"at": time.time(), "imported": 0.0, "met": 0.0}
    times |= {"compiled": 0.0, "joined": 0.0}
    group[0].take([{"event": "begun", "step": 0, "print": "p", "times": times}])
    self.everyone += group
    self.live[replica] = group
    return group

  def kill(self, replica):
    self.log.append(f"kill {replica}")
    for one in self.live[replica]:
      one.ended_at = one.ended_at or time.time()

  def tell(self, what, *replicas):
    self.log.append(f"{what} {replicas[0]}")

  def finish(self):
    self.log.append("finish")

  def wait(self, ready, what, seconds):
    for _ in range(5):
      if ready():
        return
      if not self.hangs:
        self._look()
    raise groups.Stuck(f"{what} in {seconds:g} s")

  def _look(self):
    for group in self.live.values():
      for one in group:
        fault = one.process.armed
        if fault and one.said("armed"):
          one.take([{"event": "struck", "at": time.time()}])
          one.process.armed, one.ended_at = None, time.time()
        elif fault:
          one.take([{"event": "armed"}])
    whole = [r for r, g in self.live.items() if not any(p.ended_at for p in g)]
    if self.leader not in whole:
      self.leader = whole[0] if whole else None
    number = next(self.clock)
    for replica in whole:
      for one in self.live[replica]:
        step = {"event": "step", "step": number, "print": f"p{number}"}
        step |= {"members": sorted(whole), "leader": replica == self.leader}
        one.take([step | {"at": time.time()}])


@pytest.fixture
def made(monkeypatch):
  """All runs that were made."""
  found = []

  def make(*told, **named):
    found.append(Groups(*told, **named))
    return found[-1]

  monkeypatch.setattr(groups, "Groups", make)
  monkeypatch.setattr(pool, "living", lambda token: [])
  return found


def _case(phase, replica, rank, number=3):
  return group_run.Case(0, phase, replica, rank, number)


def test_a_process_is_armed_in_the_running_run(made, tmp_path):
  with group_run.Strikes(tmp_path, 2) as strikes:
    result = strikes.strike(_case("gather", 1, 1))
    assert result.problems == []
    assert result.struck
    [run] = made
    # Both begin; after the kill its replica starts again as a whole.
    assert run.log == ["start 0", "start 1", "kill 1", "start 1"]
    assert [p.replica for p in run.everyone if p.said("struck")] == [1]
    assert [p.rank for p in run.everyone if p.said("struck")] == [1]
    assert set(result.back) == set(group_run.PARTS)
    assert result.next_commit >= 0
    assert result.steps == run.live[1][0].step > 0
    # The next kill is in the same run.
    strikes.strike(_case("gather", 0, 0))
    assert made == [run]
  assert run.log[-1] == "end"


def test_only_a_leader_comes_to_commit(made, tmp_path):
  with group_run.Strikes(tmp_path, 2) as strikes:
    result = strikes.strike(_case("committing", 1, 0))
    assert result.problems == []
    # Replica 0 led; while it is restarted the other one becomes the leader.
    assert made[0].log == [
      *("start 0", "start 1", "kill 0", "start 0"),
      *("kill 1", "start 1"),
    ]


def test_a_leader_need_not_be_made(made, tmp_path):
  with group_run.Strikes(tmp_path, 2) as strikes:
    strikes.strike(_case("committing", 0, 0))
    assert made[0].log == ["start 0", "start 1", "kill 0", "start 0"]


def test_at_a_start_the_fault_comes_with_it(made, tmp_path):
  with group_run.Strikes(tmp_path, 2) as strikes:
    result = strikes.strike(_case("fetching_snapshot", 1, 1, 1))
    assert result.problems == []
    fault = {"phase": "fetching_snapshot", "time": 1}
    assert made[0].log == [
      *("start 0", "start 1", "kill 1", f"start 1 { ({1: fault}) }"),
      *("kill 1", "start 1"),
    ]


def test_a_process_to_be_struck_while_saving_is_asked_to_save(made, tmp_path):
  with group_run.Strikes(tmp_path, 2) as strikes:
    strikes.strike(_case("checkpointing", 1, 0, 1))
    assert made[0].log[2] == "save 1"


def test_after_a_hang_the_next_kill_has_a_run_of_its_own(
  made, tmp_path, monkeypatch
):
  with group_run.Strikes(tmp_path, 2, deadline=7.0) as strikes:
    strikes.strike(_case("gather", 1, 1))
    monkeypatch.setattr(Groups, "hangs", True)
    result = strikes.strike(_case("gather", 1, 1))
    assert not result.struck
    assert "does not hear in 7 s" in result.problems[0]
    assert made[0].log[-1] == "end"
    monkeypatch.setattr(Groups, "hangs", False)
    assert strikes.strike(_case("gather", 1, 1)).problems == []
    assert len(made) == 2
    assert made[1].journal != made[0].journal


def _ends(run):
  """Lets a run of two replicas end well, after one step."""
  members = [
    {
      **{"replica": r, "local_step": 0, "staleness": 0},
      "batches": [[r, run.live[r][0].incarnation, 0]],
    }
    for r in (0, 1)
  ]
  commit = {"kind": "commit", "step": 0, "members": members}
  with open(run.journal, "w") as file:
    file.write(json.dumps(commit) + "\n")
  seen = {
    **{"event": "result", "step": 1, "waited": 0.0, "reasons": {}},
    **{"calls": [0], "accepted": [0], "prints": {"1": "end"}},
    "stats": {"gradients": {"applied": 1}, "pending": 0},
  }
  everyone = [p for group in run.live.values() for p in group]
  for one in everyone:
    one.prints.clear()
    one.take([dict(seen)])
  run.run = lambda deadline: everyone
  return everyone


def test_the_end_of_a_run_is_checked(made, tmp_path):
  with group_run.Strikes(tmp_path, 2) as strikes:
    assert strikes.finish() == []  # There was none.
    strikes._running()
    _ends(made[0])
    assert strikes.finish() == []
    # Of each of the two processes, after the step.
    assert strikes.compared == 2
    assert made[0].log[-2:] == ["finish", "end"]


def test_differing_processes_and_lost_gradients_are_reported(made, tmp_path):
  with group_run.Strikes(tmp_path, 2) as strikes:
    strikes._running()
    everyone = _ends(made[0])
    everyone[-1].result["prints"] = {"1": "another"}
    everyone[0].result["accepted"] = []
    problems = strikes.finish()
    assert problems[-1] == "diverged: after steps [1]"
    assert any(p.startswith("replica 0 takes") for p in problems)


def test_a_run_that_never_ends_is_reported(made, tmp_path):
  def stuck(deadline):
    raise groups.Stuck(f"not all in {deadline:g} s")

  with group_run.Strikes(tmp_path, 2, deadline=3.0) as strikes:
    strikes._running().run = stuck
    assert strikes.finish() == ["hang at the end: not all in 3 s"]
  assert made[0].log.count("end") == 1


def test_a_phase_that_never_comes_is_reported(tmp_path, monkeypatch):
  """A replica that has no processes never begins."""
  monkeypatch.setattr(groups.Groups, "start", lambda *told: [])
  with group_run.Strikes(tmp_path, 2, deadline=0.1) as strikes:
    monkeypatch.setattr(
      strikes,
      "_wait_for_both",
      lambda run, after, what: run.wait(lambda: False, what, 0.1),
    )
    result = strikes.strike(group_run.case(2, 2))
  assert not result.struck
  assert "the replicas do not begin in 0.1 s" in result.problems[0]
  assert strikes.left() == []


@pytest.mark.parametrize("processes", [2, 3])
def test_seeds_in_a_row_kill_each_process_in_each_phase_that_it_enters(
  processes,
):
  cells = group_run.cells(processes)
  cases = [group_run.case(seed, processes) for seed in range(len(cells))]
  assert len(set(map(str, cases))) == len(cells)
  ranks = collections.defaultdict(set)
  for case in cases:
    ranks[case.phase].add(case.rank)
  alone = {"committing", "joining"}
  assert ranks == {
    phase: {0} if phase in alone else set(range(processes))
    for phase in group_run.PHASES
  }
  assert "serving" not in ranks


def test_the_table_of_kills_shows_what_went_wrong(made, tmp_path, capsys):
  class Strikes(group_run.Strikes):
    def finish(self):
      return ["diverged: after steps [3]"]

    def _strike(self, case, result):
      if case.seed == 2:
        raise groups.Stuck("no step")
      result.back = dict.fromkeys(group_run.PARTS, 0.5)
      result.next_commit = 0.25 * case.seed

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(group_run, "Strikes", Strikes)
    assert group_run.run(tmp_path, range(6), 2)
  out = capsys.readouterr().out
  assert "seed 2, computing/kill/0.0: 0 s, not struck: no step\n" in out
  assert "5 of 6 kills went well" in out
  assert "the run: diverged: after steps [3]\n" in out
  # Of seeds 0, 1, 3, 4 and 5.
  assert "other replica: median 0.750 s, longest 1.250 s" in out
