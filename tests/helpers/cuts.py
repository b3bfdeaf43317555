"""Replicas and their store on separate hosts, whose network is cut.

One run goes on while its network is cut and heals, again and again; at its end
all is checked.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pathlib
import subprocess
import sys
import threading
import time

import hosts as host_maker

from optax_dist.coordinator import journal
from tests.chaos import checks

TARGETS = ("replica", "leader", "store", "two replicas")
LEADER_TIMEOUT, ATTEMPT_TIMEOUT, TIMEOUT = 4.0, 4.0, 60.0
# For a busy machine, beyond what time-outs say.
SLACK = 6.0
_SECRET = "a secret of enough bytes"
_PROGRAM = pathlib.Path(__file__).with_name("cut_replica.py")


@dataclasses.dataclass(frozen=True)
class Outcome:
  """The result of a cut; times in seconds.

  Attributes:
    stall: the longest that no replica has taken a step, from the cut until all
      took part again.
    back: from the end of the cut until all took part again.
  """

  stall: float
  back: float


def too_late(
  target: str, seconds: float, found: Outcome, slack: float = SLACK
) -> list[str]:
  """What of a cut took longer than the time-outs allow.

  Nobody goes on without the store. Otherwise a peer that is silent is given up
  after `leader_timeout`, and so is an exchange, after `attempt_timeout`.
  """
  allowed = seconds
  if target != "store":
    allowed = min(seconds, LEADER_TIMEOUT + ATTEMPT_TIMEOUT)
  late = []
  if found.stall > allowed + slack:
    late.append(f"{target}: stood still {found.stall:.1f} s")
  if found.back > LEADER_TIMEOUT + slack:
    late.append(f"{target}: all were back after {found.back:.1f} s")
  return late


class _Replica:
  """A replica's process, and what it has said."""

  def __init__(self, process):
    self.process = process
    self.steps, self.result, self.joined = [], None, False
    self._thread = threading.Thread(target=self._read, daemon=True)
    self._thread.start()

  def _read(self):
    for line in self.process.stdout:
      said = json.loads(line)
      match said["event"]:
        case "joined":
          self.joined = True
        case "step":
          self.steps.append(said)
        case "result":
          self.result = said

  def close(self):
    """Closes its pipes, once the process has ended."""
    self._thread.join()
    self.process.stdout.close()
    self.process.stdin.close()

  @property
  def is_leader(self):
    return bool(self.steps and self.steps[-1]["leader"])


class Run:
  """Some replicas, each on a host, and the store on the last; a context manager.

  Args:
    folder: for outputs.
    count: how many replicas.
    version: of IP.
    hostnames: whether hosts find their own names at 127.0.1.1.
    delay: seconds that each packet takes from the start.
    special: by replica, what differs for it.
    **options: for `coordinator.join`, in place of these.
  """

  def __init__(
    self,
    folder,
    count,
    *,
    version=4,
    hostnames=False,
    delay=0.0,
    special=None,
    **options,
  ):
    self.folder, self.count = folder, count
    self._version, self._hostnames, self._delay = version, hostnames, delay
    self._options, self._special = options, special or {}
    self._everyone = []
    self._finishing = False

  def __enter__(self):
    self.hosts = host_maker.Hosts(self.count + 1, hostnames=self._hostnames)
    try:
      if self._delay:
        self.hosts.shape(delay=self._delay)
      self._start()
    except BaseException:
      self.hosts.close()
      raise
    return self

  def __exit__(self, *_):
    self.hosts.close()
    for one in self._everyone:
      one.close()
    self._store.stdout.close()

  def _start(self):
    store = self.count
    host = self.hosts.address(store, self._version)
    address = f"[{host}]:29300" if self._version == 6 else f"{host}:29300"
    environment = os.environ | {
      "JAX_PLATFORMS": "cpu",
      "OPTAX_DIST_SECRET": _SECRET,
      "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    self._errors = []
    self._store = self.hosts.python(
      store,
      *("-m", "optax_dist.coordinator.store"),
      *("--bind", "::" if self._version == 6 else "0.0.0.0"),
      *("--advertise", host),
      stdout=subprocess.PIPE,
      env=environment,
    )
    assert self._store.stdout.readline().startswith(b"ready")
    self.journal = self.folder / "journal.jsonl"
    self.replicas = []
    for number in range(self.count):
      error = self.folder / f"replica-{number}.err"
      self._errors.append(error)
      options = {
        "replica": number,
        "total_num_replicas": self.count,
        "coordinator_address": address,
        "start_store": False,
        "lower_on_loss": True,
        "journal": str(self.journal),
        "timeout": TIMEOUT,
        "attempt_timeout": ATTEMPT_TIMEOUT,
        "leader_timeout": LEADER_TIMEOUT,
        "pause": 0.03,
        "width": 20_000,  # Too large to be sent inline.
        **self._options,
        **self._special.get(number, {}),
      }
      with error.open("w") as file:
        process = self.hosts.python(
          number,
          *(str(_PROGRAM), json.dumps(options)),
          stdin=subprocess.PIPE,
          stdout=subprocess.PIPE,
          stderr=file,
          env=environment,
        )
      self.replicas.append(_Replica(process))
      self._everyone.append(self.replicas[-1])
    everyone = self.replicas
    self.wait(lambda: all(r.joined for r in everyone), "not all join", 240.0)

  def wait(self, ready, what, seconds):
    """Waits until a condition is true; all must stay alive, and in the run."""
    end = time.monotonic() + seconds
    while not ready():
      assert time.monotonic() < end, f"{what} in {seconds:g} s\n{self.where()}"
      for one in self.replicas:
        assert one.process.poll() in (None, 0), f"{what}\n{self.where()}"
        early = one.result is not None and not self._finishing
        assert not early, f"ended early: {what}\n{self.where()}"
      time.sleep(0.01)

  def where(self):
    """Where each replica is, and what it has printed last."""
    return "\n".join(
      f"--- replica {i} at step {one.steps and one.steps[-1]}, exit code"
      f" {one.process.poll()}\n{error.read_text()[-3000:]}"
      for i, (one, error) in enumerate(
        zip(self.replicas, self._errors, strict=True)
      )
    )

  def wait_for_all(self, after, seconds=240.0):
    """Waits until each has taken a step since, together with all others."""
    everyone = list(range(self.count))
    together = lambda one: any(
      s["at"] > after and s["members"] == everyone for s in one.steps[-50:]
    )
    self.wait(
      lambda: all(together(one) for one in self.replicas),
      "not all take part",
      seconds,
    )

  def victims(self, target):
    """The hosts on both sides of a cut that concerns a target."""
    everyone = range(self.count + 1)
    leader = next(
      (i for i, one in enumerate(self.replicas) if one.is_leader), 0
    )
    others = [i for i in range(self.count) if i != leader]
    match target:
      case "replica":
        some = [others[-1]]
      case "leader":
        some = [leader]
      case "store":
        some = [self.count]
      case "two replicas":
        pair = others[-2:] if len(others) > 1 else [leader, *others]
        return pair[:1], pair[1:]
    return some, [i for i in everyone if i not in some]

  def cut(self, target, seconds, *, both):
    """Cuts, waits, heals, and waits until all take part again."""
    self.wait_for_all(time.monotonic())
    some, others = self.victims(target)
    began = time.monotonic()
    self.hosts.cut(some, others, both=both)
    self._sleep(seconds)
    healed = time.monotonic()
    self.hosts.heal()
    self.wait_for_all(healed)
    back = max(
      next(
        s["at"]
        for s in one.steps
        if s["at"] > healed and len(s["members"]) == self.count
      )
      for one in self.replicas
    )
    return Outcome(self.longest_stall(began, back), back - healed)

  def vanish(self, seconds):
    """Removes a host permanently; returns the stall of the others."""
    some, _ = self.victims("replica")
    began = time.monotonic()
    self.hosts.vanish(some[0])
    gone = self.replicas[some[0]]
    rest = [i for i in range(self.count) if i != some[0]]
    self.replicas = [self.replicas[i] for i in rest]
    self._errors = [self._errors[i] for i in rest]
    without = lambda one: any(
      s["at"] > began and s["members"] == rest for s in one.steps[-50:]
    )
    self.wait(
      lambda: all(without(one) for one in self.replicas),
      "the others don't go on",
      seconds,
    )
    stall = self.longest_stall(began, time.monotonic())
    gone.process.kill()
    return stall

  def longest_stall(self, since, until):
    """The longest time in which no replica has taken a step."""
    times = sorted(s["at"] for one in self.replicas for s in one.steps)
    inside = [t for t in times if since < t < until]
    marks = [since, *inside, until]
    return max(b - a for a, b in itertools.pairwise(marks))

  def wait_for_steps(self, more, seconds=240.0):
    """Waits until the first replica has taken that many more steps."""
    steps = self.replicas[0].steps
    end = len(steps) + more
    self.wait(lambda: len(steps) >= end, f"no {more} steps", seconds)

  def rate(self, seconds):
    """Steps per second, from now on for so long."""
    first = self.replicas[0].steps
    before = len(first)
    self._sleep(seconds)
    return (len(first) - before) / seconds

  def cut_repeatedly(self, times, seconds, healed):
    """Cuts one follower's host off, again and again."""
    self.wait_for_all(time.monotonic())
    (victim,), others = self.victims("replica")
    for _ in range(times):
      self.hosts.cut([victim], others)
      self._sleep(seconds)
      self.hosts.heal()
      self._sleep(healed)
    self.wait_for_all(time.monotonic())

  def finish(self):
    """Has the run end; returns how many steps it had, and what is wrong."""
    self._finishing = True
    for one in self.replicas:
      one.process.stdin.write(b"\n")
      one.process.stdin.flush()
    self.wait(lambda: all(one.result for one in self.replicas), "no end", 240.0)
    self.wait(
      lambda: all(one.process.poll() == 0 for one in self.replicas),
      "processes don't end",
      240.0,
    )
    lines = self.journal.read_text().splitlines()
    records = list(filter(journal.Once(), map(json.loads, lines)))
    reports = [(one.result["number"], 0, one.result) for one in self.replicas]
    return checks.check(records, reports, TIMEOUT)

  def _sleep(self, seconds):
    """Waits, unless a replica ends."""
    end = time.monotonic() + seconds
    self.wait(lambda: time.monotonic() >= end, "a cut", seconds + 60.0)
