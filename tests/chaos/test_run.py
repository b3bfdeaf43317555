"""A run of the fault matrix: whom the fault hits, with processes a test plays."""

import dataclasses
import json
import os
import signal
import types

import descriptors
import pytest

from tests.chaos import cases
from tests.chaos import run as runs


class Process:
  """Stands for a `child.Child`."""

  def __init__(self, number):
    self.name, self.pid = f"process {number}", number
    self.sent, self.signals = [], []
    self.popen = types.SimpleNamespace(
      returncode=None, wait=lambda seconds: None
    )

  def send(self, message):
    self.sent.append(message["do"])

  def signal(self, number):
    self.signals.append(number)

  def ending(self):
    return f"ended with exit code {self.popen.returncode}"

  def tail(self, lines):
    return "its last line"


class Pool:
  """Stands for a `Pool`."""

  address, secret = "127.0.0.1:1", "secret"

  def __init__(self, folder):
    self.folder, self.started = folder, 0
    self.kept, self.discarded, self.left = [], [], []

  def take(self):
    self.started += 1
    return Process(self.started)

  def give_back(self, process):
    self.kept.append(process)

  def discard(self, process):
    self.discarded.append(process)

  def orphans(self):
    return self.left


def _step(number, leader=False):
  return {"event": "step", "step": number, "leader": leader}


def _case(phase, fault, who="replica", **fields):
  return dataclasses.replace(
    cases.case(0),
    **{"phase": phase, "fault": fault, "who": who, "data": ""} | fields,
  )


@pytest.fixture
def started(tmp_path):
  """Starts a run of three replicas at step 3; the first one leads."""

  def start(case, steps=(3, 3, 3)):
    run = runs._Run(Pool(tmp_path), case)
    for replica, step in enumerate(steps):
      run._add(replica, 0)
      if step:
        run._members[-1].events.append(_step(step, replica == 0))
    for member in run._members:
      member.process.sent.clear()
    return run

  return start


def _orders(run):
  return [member.process.sent for member in run._members]


@pytest.mark.parametrize(
  ("problems", "outcome"),
  [
    ([], "ok"),
    (["hang: not over after 90 s; replica 1 at step 3"], "hang"),
    (["replica 0: Boom", "hang: not over after 90 s"], "hang"),
    (["diverged: after steps [3]"], "diverged"),
    (["not struck: the phase was not reached"], "not struck"),
    (["ended early: replica 1 at step 3"], "ended early"),
    (["replica 2 has waited 41.0 s"], "wrong"),
    # Words of a replica's error that only look like it.
    (["replica 0: the exchange of step 3 failed"], "wrong"),
    (["replica 0: the parameters were changed, not struck"], "wrong"),
  ],
)
def test_a_result_is_one_word(problems, outcome):
  assert runs.Result(cases.case(0), problems=problems).outcome == outcome


def test_messages_are_read_from_descriptors_with_large_numbers(started):
  run = started(_case("computing", "kill"))
  read, write = os.pipe()
  os.write(write, b"{}")
  with descriptors.high(read) as number:
    for member in run._members:
      member.process.fileno = lambda: number
      member.process.read = lambda: ([_step(4)], False)
    run._members = run._members[:1]
    run._look()
  assert run._members[0].step == 4
  os.close(read)
  os.close(write)


def test_the_process_that_enters_the_phase_is_struck_once(started):
  run = started(_case("computing", "kill"))
  run._reached(run._members[1])
  assert _orders(run) == [["disarm"], ["disarm", "strike"], ["disarm"]]
  assert run._result.struck
  assert run._struck_at == 3
  run._reached(run._members[2])
  assert run._members[2].process.sent == ["disarm", "go"]


def test_no_process_is_struck_before_all_have_taken_a_step(started):
  run = started(_case("computing", "kill"), steps=(3, 3, 0))
  run._reached(run._members[1])
  assert _orders(run) == [[], ["go"], []]
  # One that has not taken a step may be the one that is struck.
  run._reached(run._members[2])
  assert run._members[2].process.sent == ["disarm", "strike"]


@pytest.mark.parametrize(
  ("fault", "signals", "order"),
  [
    ("kill", [signal.SIGKILL], ["disarm"]),
    ("stop", [signal.SIGSTOP], ["disarm"]),
    ("delay", [signal.SIGSTOP], ["disarm"]),
    ("disconnect", [], ["disarm", "inflict"]),
    ("corrupt", [], ["disarm", "inflict"]),
  ],
)
def test_a_replica_is_hit_while_the_leader_commits(
  started, fault, signals, order
):
  run = started(_case("committing", fault))
  run._reached(run._members[0])
  leader, victim, other = (member.process for member in run._members)
  assert (victim.signals, victim.sent) == (signals, order)
  assert (leader.signals, leader.sent) == ([], ["disarm", "go"])
  assert (other.signals, other.sent) == ([], ["disarm"])
  # What is stopped is to be continued.
  later = [member.process for _, member in run._to_continue]
  assert later == ([victim] if signal.SIGSTOP in signals else [])


def test_the_leader_is_hit_while_another_one_joins(started):
  run = started(_case("joining", "kill", "leader"), steps=(3, 3, 0))
  run._primed = True
  run._reached(run._members[2])
  assert [m.process.signals for m in run._members] == [
    *([signal.SIGKILL], [], [])
  ]
  assert run._members[2].process.sent == ["disarm", "go"]


def test_a_leader_that_joins_is_struck_itself(started):
  run = started(_case("joining", "kill", "leader"))
  run._primed = True
  run._reached(run._members[0])
  assert run._members[0].process.sent == ["disarm", "strike"]


def test_the_last_one_with_the_state_is_not_taken_away(started):
  """The only other one that fetches a snapshot has none."""
  case = _case("fetching_snapshot", "kill", "leader")
  run = started(case, steps=(3, 0, 0))
  run._primed = True
  for member in run._members[1:]:
    member.incarnation = 1
  run._reached(run._members[2])
  assert _orders(run) == [[], [], ["go"]]
  assert not run._result.struck
  # A stopped one keeps its state.
  run = started(dataclasses.replace(case, fault="stop"), steps=(3, 0, 0))
  run._primed = True
  for member in run._members[1:]:
    member.incarnation = 1
  run._reached(run._members[2])
  assert run._members[0].process.signals == [signal.SIGSTOP]


def test_a_case_of_joining_begins_with_a_kill(started):
  run = started(_case("serving", "kill", after=4))
  run._reached(run._members[1])
  assert run._members[1].process.sent == ["go"]  # Nobody joins yet.
  run._advance()
  assert not run._primed
  for number, member in enumerate(run._members):
    member.events.append(_step(4, number == 0))
  run._advance()
  assert run._primed
  assert [m.process.signals for m in run._members] == [
    *([], [], [signal.SIGKILL])
  ]


@pytest.mark.parametrize(("code", "problems"), [(-signal.SIGKILL, 0), (1, 1)])
def test_a_killed_process_is_replaced(started, code, problems):
  run = started(_case("computing", "kill"))
  member = run._members[1]
  member.process.popen.returncode = code
  run._died(member)
  assert len(run._result.problems) == problems
  assert all("its last line" in problem for problem in run._result.problems)
  assert run._pool.discarded == [member.process]
  again = run._members[-1]
  assert (again.replica, again.incarnation) == (1, 1)
  assert member.over
  assert not again.over


def test_a_replica_does_not_die_for_ever(started):
  run = started(_case("computing", "kill"))
  for _ in range(100):
    member = [m for m in run._members if m.replica == 1][-1]
    member.process.popen.returncode = -signal.SIGKILL
    run._died(member)
  assert sum(m.replica == 1 for m in run._members) == runs._LIVES


def test_the_run_ends_some_steps_after_the_fault(started):
  run = started(_case("computing", "stop"))
  run._advance()
  assert not run._finishing
  run._reached(run._members[1])
  for number, member in enumerate(run._members):
    member.events.append(_step(8 + (number > 0)))
  run._advance()
  assert not run._finishing  # One is at 8, five steps after it.
  run._members[0].events.append(_step(9))
  run._to_continue = [(0.0, run._members[1])]
  run._advance()
  assert not run._finishing  # One is to be continued first.
  run._to_continue = []
  run._advance()
  assert run._finishing
  assert [orders[-1] for orders in _orders(run)] == ["finish"] * 3
  # Who comes back later is told, too.
  run._add(1, 1)
  assert run._members[-1].process.sent == ["run", "finish"]


def _report():
  return {
    **{"event": "result", "error": None, "step": 1, "waited": 0.0},
    **{"calls": [0], "accepted": [0], "reasons": {}, "prints": {}},
    "stats": {"gradients": {"applied": 1}, "pending": 0},
  }


def _commit(step, *replicas):
  return {
    "kind": "commit",
    "step": step,
    "members": [
      {
        **{"replica": replica, "local_step": step, "staleness": 0},
        "batches": [[replica, 0, step]],
      }
      for replica in replicas
    ],
  }


def test_a_good_run_is_checked_and_its_processes_are_kept(started):
  run = started(_case("computing", "stop"))
  run._result.struck = True
  for member in run._members:
    member.events.append(_report())
  # A leader that was stopped writes a line that its successor has written.
  run._journal.write_text(2 * (json.dumps(_commit(0, 0, 1, 2)) + "\n"))
  run._conclude()
  assert (run._result.steps, run._result.problems) == (1, [])
  assert len(run._pool.kept) == 3


def test_leftover_processes_are_reported(started):
  run = started(_case("computing", "stop"))
  for member in run._members[:2]:
    member.events.append(_report())
  run._journal.write_text(json.dumps(_commit(0, 0, 1)) + "\nnonsense\n")
  run._pool.left = [77]
  run._conclude()
  assert run._result.problems == [
    "not struck: the phase was not reached",
    "the journal has a bad line",
    "orphans: [77]",
  ]
  # The third never reported, so it does not go into another run.
  assert run._pool.discarded == [run._members[2].process]


def test_an_error_of_a_replica_is_a_problem_and_an_end_is_none(started):
  run = started(_case("computing", "stop"))
  run._finishing = True
  for error in (None, "finished", "Boom: it broke"):
    run._take(run._members[0], _report() | {"error": error})
  assert run._result.problems == ["replica 0: Boom: it broke"]


def test_a_replica_that_ends_before_it_is_told_to_ended_early(started):
  run = started(_case("computing", "stop"))
  run._take(run._members[0], _report())
  assert run._result.problems == ["ended early: replica 0 at step 3"]


def test_an_outage_of_all_stops_all_and_comes_again_once_steps_go_on(started):
  run = started(_case(cases.OUTAGE, "pause-all", after=3, times=2, at="gather"))
  for member in run._members:
    member.events.append({"event": "joined"})
  run._advance()
  assert [m.process.signals for m in run._members] == [[]] * 3
  run._reached(run._members[1])
  assert _orders(run) == [[], ["go"], []]
  assert [m.process.signals for m in run._members] == [[signal.SIGSTOP]] * 3
  run._to_continue = []
  run._advance()
  assert not run._finishing
  for number, member in enumerate(run._members):
    member.events.append(_step(6, number == 0))
  run._reached(run._members[2])
  assert [len(m.process.signals) for m in run._members] == [2] * 3
  run._to_continue = []
  for member in run._members:
    member.events.append(_step(12))
  run._advance()
  assert run._finishing


@pytest.mark.parametrize(("who", "stopped"), [("leader", 0), ("replica", 2)])
def test_an_outage_of_one_stops_the_leader_or_another(started, who, stopped):
  run = started(_case(cases.OUTAGE, "stop-one", who, after=3))
  for member in run._members:
    member.events.append({"event": "joined"})
  run._advance()
  signals = [m.process.signals for m in run._members]
  assert [bool(some) for some in signals] == [i == stopped for i in range(3)]
