"""Runs of real processes on loopback, and what must hold after each of them."""

import json
import pathlib
import secrets
import select
import signal
import sys
import time

import compiling
import logged_child
import training_process

from optax_dist.coordinator import journal
from optax_dist.coordinator.store import process as store_process
from optax_dist.simulate import replay_run
from tests.chaos import checks as chaos_checks

# No wait of a test lasts longer, and none of a replica longer than TIMEOUT.
DEADLINE = 150.0
TIMEOUT = 60.0
CONTINUE = signal.SIGCONT
_PROGRAM = str(pathlib.Path(__file__).with_name("training_process.py"))


class Machine:
  """Processes that wait for runs, and one store for all of them.

  A context manager; nothing is left when it ends.
  """

  def __init__(self, folder):
    self.folder = folder
    self._everyone, self._idle, self._members = [], [], []
    self._store, self.secret = None, secrets.token_hex()

  def __enter__(self):
    self._store = store_process.start(self.secret.encode(), port=0)
    return self

  def __exit__(self, *error):
    for process in self._everyone:
      process.kill()
    if self._store is not None:
      self._store.stop()

  @property
  def address(self):
    return self._store.address.partition(",")[0]

  def prepare(self, number):
    """Starts processes in advance, all at once."""
    while len(self._idle) < number:
      self._idle.append(
        logged_child.LoggedChild(
          "a process",
          [sys.executable, _PROGRAM],
          self.folder / f"process-{len(self._everyone)}.log",
          {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
          | compiling.as_here(),
        )
      )
      self._everyone.append(self._idle[-1])

  def take(self):
    """A process that is free."""
    self.prepare(1)
    return self._idle.pop(0)

  def give_back(self, process):
    """It is free again, unless it has ended."""
    if process.popen.poll() is None and process not in self._idle:
      self._idle.append(process)

  def enter(self, member):
    """What its process says of its run goes to this member from now on."""
    self._members.append(member)

  def wait(self, ready, what, seconds=DEADLINE):
    """Waits until a condition is true, or fails with each process's state."""
    end = time.monotonic() + seconds
    while not ready():
      assert time.monotonic() < end, f"{what}: {self._where()}"
      self._look()

  def _look(self):
    live = [m for m in self._members if not m.over]
    processes = {m.process.pid: m.process for m in live}
    found, _, _ = select.select([*processes.values()], [], [], 0.05)
    for process in found:
      events, ended = process.read()
      for event in events:
        for m in live:
          if m.process is process and m.run.name == event.get("run"):
            m.hear(event)
      for m in live if ended else ():
        if m.process is process:
          m.ended_at = time.monotonic()
    # Who ends without having been told to is no fault of the test's making.
    odd = [m for m in live if m.ended_at and not m.is_to_die]
    assert not odd, "\n".join(f"{m}: {m.process.tail()}" for m in odd)

  def _where(self):
    told = []
    for m in self._members:
      if not m.over:
        m.process.signal(signal.SIGCONT)
        told.append(f"{m} at step {m.step}\n{m.process.where()}")
    return "\n".join(told)


class Member:
  """A replica of a run, as its launcher sees it.

  Attributes:
    result: what it saw, once it has ended by itself.
    ended_at: when its process ended.
  """

  def __init__(self, run, process, replica, incarnation, job):
    self.run, self.process = run, process
    self.replica, self.incarnation = replica, incarnation
    self.is_to_die = (job.get("fault") or {}).get("what") == "kill"
    self.leaves = "gradients" in job
    self.events, self.result, self.ended_at = [], None, None
    self.step = 0

  def __str__(self):
    return f"replica {self.replica}.{self.incarnation} of {self.run.name}"

  @property
  def over(self):
    return self.result is not None or self.ended_at is not None

  def hear(self, event):
    self.events.append(event["event"])
    if event["event"] == "result":
      self.result = event
    if event["event"] == "step":
      self.step = event["step"]

  def said(self, event):
    """Whether it has said this; a condition to wait for."""
    return event in self.events

  def tell(self, what):
    self.process.send({"do": what, "run": self.run.name})

  def kill(self):
    """Ends it by SIGKILL."""
    self.is_to_die = True
    self.process.signal(signal.SIGKILL)
    self.run.machine.wait(lambda: self.over, f"the end of {self}")


class Run:
  """One run: its processes, and its journal."""

  def __init__(self, machine, folder, k, n, name="run", width=30, **options):
    self.machine = machine
    self.name = f"{name} {secrets.token_hex(4)}"
    self.journal = folder / f"{name}.jsonl"
    self.members, self.width = [], width
    self._begun = False
    self._options = {
      "coordinator_address": machine.address,
      "replicas_to_aggregate": k,
      "total_num_replicas": n,
      "run": self.name,
      "secret": machine.secret,
      "start_store": False,
      "journal": str(self.journal),
      "fingerprint_every": 1,
      "inline_bytes": 0,
      "timeout": TIMEOUT,
      "attempt_timeout": 10.0,
      "leader_timeout": 5.0,
    } | options

  def add(self, replica, incarnation=0, process=None, **job):
    """Starts a replica; it waits for the beginning once it has joined."""
    process = process or self.machine.take()
    member = Member(self, process, replica, incarnation, job)
    self.members.append(member)
    self.machine.enter(member)
    member.process.send(
      {
        "do": "run",
        "run": self.name,
        "replica": replica,
        "incarnation": incarnation,
        "width": self.width,
        "join": self._options | {"replica": replica},
      }
      | job
    )
    if self._begun:
      member.tell("begin")
    return member

  def begin(self):
    """Lets all train as soon as all have joined."""
    self.wait_all("joined")
    self._begun = True
    for member in self.members:
      member.tell("begin")

  def start(self, n, first_alone=False, **jobs):
    """Adds replicas 0 to n - 1, and lets them train.

    Args:
      n: how many.
      first_alone: whether replica 0 is there first, and so is leader.
      **jobs: what is special about some, by ``replica_<number>``.
    """
    for replica in range(n):
      self.add(replica, **jobs.get(f"replica_{replica}", {}))
      if first_alone and not replica:
        self.wait_all("joined")
    self.begin()
    return self.members

  def wait_all(self, event):
    self.machine.wait(
      lambda: all(m.said(event) for m in self.members), f"{event!r} of all"
    )

  @property
  def live(self):
    return [m for m in self.members if not m.over]

  @property
  def furthest(self):
    return max(m.step for m in self.members)

  def wait_steps(self, more, of=None):
    """Waits until all have taken that many more steps than any has now."""
    aim = self.furthest + more
    of = self.live if of is None else of
    assert of
    self.machine.wait(
      lambda: all(m.step >= aim for m in of), f"step {aim} of {self.name}"
    )

  def records(self, kind=None):
    text, _, _ = self.journal.read_text().rpartition("\n")
    found = filter(journal.Once(), map(json.loads, text.splitlines()))
    return [r for r in found if kind in (None, r["kind"])]

  def gradients(self):
    """The keys of those that were applied, with the step of each."""
    return [
      (record["step"], tuple(key))
      for record in self.records("commit")
      for member in record["members"]
      for key in member["batches"]
    ]

  def finish(self):
    """Ends the run for all, and has their processes back."""
    for member in self.live:
      member.tell("finish")
    self.machine.wait(lambda: not self.live, f"the end of {self.name}")
    for member in self.members:
      self.machine.give_back(member.process)

  def check(self, before=()):
    """What must hold after every run.

    The ledger adds up, all replicas held the same after each step, no wait
    passed its deadline, and journal and data give the same numbers again.

    Args:
      before: the records of the runs that this one was resumed from.
    """
    for m in self.members:
      assert m.ended_at or m.result["error"] is None, f"{m}: {m.result}"
    mine = self.records()
    first = mine[0]["step"]
    known = [r for r in before if r["kind"] == "commit" and r["step"] < first]
    found = known + mine
    steps = sum(r["kind"] == "commit" for r in found)
    # A replica that has left was not there at the end.
    last = {"step": steps}
    told = [
      (m.replica, m.incarnation, m.result | (last if m.leaves else {}))
      for m in self.members
      if m.result is not None
    ]
    assert chaos_checks.check(found, told, TIMEOUT) == (steps, [])
    seen = [
      {"kind": "fingerprint", "step": int(step), "replica": i, "state": text}
      for i, _, result in told
      for step, text in result["prints"].items()
    ]
    optimizer, params, gradient = training_process.model(self.width)
    again = replay_run(
      [*before, *mine, *seen],
      optimizer=optimizer,
      params=params,
      gradient=gradient,
    )
    assert str(again) == f"identical, {steps} steps"
