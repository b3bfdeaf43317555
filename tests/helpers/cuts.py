"""Replicas and their coordinator on separate hosts, whose network is cut.

One run goes on while its network is cut and heals, again and again; at its end
all is checked.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
import time

import hosts as host_maker

from tests.chaos import checks, replica
from tests.chaos.members import Members, read_journal
from tests.chaos.pool import Pool

TARGETS = ("replica", "coordinator", "two replicas")
SILENCE_TIMEOUT, TRANSFER_TIMEOUT, TIMEOUT = 4.0, 4.0, 60.0
# For a busy machine, beyond what time-outs say.
SLACK = 6.0


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

  Nobody goes on without the coordinator. Otherwise a peer that is silent is given
  up after `silence_timeout`, and so is an exchange, after `transfer_timeout`.
  """
  allowed = seconds
  if target != "coordinator":
    allowed = min(seconds, SILENCE_TIMEOUT + TRANSFER_TIMEOUT)
  late = []
  if found.stall > allowed + slack:
    late.append(f"{target}: stood still {found.stall:.1f} s")
  if found.back > SILENCE_TIMEOUT + slack:
    late.append(f"{target}: all were back after {found.back:.1f} s")
  return late


class Run:
  """Some replicas, each on a host, and the coordinator on the last.

  A context manager.

  Args:
    folder: for outputs.
    count: how many replicas.
    method: how processes are started; see `workers`.
    version: of IP.
    delay: seconds that each packet takes from the start.
    pauses: seconds before each gradient of a replica, by its index.
    pause: that of the others.
    width: parameters; by default too many to be sent inline.
    **options: for `coordinator.join`, in place of these.
  """

  def __init__(
    self,
    folder,
    count,
    *,
    method="spawn",
    version=4,
    delay=0.0,
    pause=0.03,
    pauses=None,
    width=20_000,
    **options,
  ):
    self._pool = Pool(folder, replica.main, method)
    self._members = Members(self._pool, "run")
    self._coordinator = None
    self.count, self._version, self._delay = count, version, delay
    self.journal = self._members.folder / "journal.jsonl"
    self._pauses = [(pauses or {}).get(i, pause) for i in range(count)]
    self._job = {
      "width": width,
      "join": {
        "total_num_replicas": count,
        "lower_on_loss": True,
        "journal": str(self.journal),
        "timeout": TIMEOUT,
        "transfer_timeout": TRANSFER_TIMEOUT,
        "silence_timeout": SILENCE_TIMEOUT,
        **options,
      },
    }

  def __enter__(self):
    self.hosts = host_maker.Hosts(self.count + 1)
    try:
      if self._delay:
        self.hosts.shape(delay=self._delay)
      self._start()
    except BaseException:
      self.__exit__()
      raise
    return self

  def __exit__(self, *_):
    self._pool.__exit__()
    self.hosts.close()
    if self._coordinator is not None:
      self._coordinator.kill()
      self._coordinator.wait()
      self._coordinator.stdout.close()

  def _start(self):
    host = self.hosts.address(self.count, self._version)
    at = f"[{host}]:29300" if self._version == 6 else f"{host}:29300"
    self._coordinator = self.hosts.python(
      self.count,
      *("-m", "optax_dist", "coordinator", "--address", at),
      *("--output", str(self._members.folder)),
      stdout=subprocess.PIPE,
      env={
        **os.environ,
        "OPTAX_DIST_SECRET": self._pool.secret,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
      },
    )
    assert self._coordinator.stdout.readline().startswith(b"ready")
    self._job["join"]["coordinator_address"] = at
    for number, pause in enumerate(self._pauses):
      name = self.hosts.names[number]
      self._members.add(number, {**self._job, "pause": pause}, host=name)
    # Those that have not vanished.
    self.replicas = list(self._members.everyone)
    joined = lambda: all(one.joined for one in self.replicas)
    self.wait(joined, "not all join", 240.0)

  def wait(self, ready, what, seconds):
    """Waits until a condition is true; all must stay alive, and in the run."""

    def checked():
      early = [one for one in self.replicas if one.result is not None]
      assert not early, f"ended early: {what}: {self._members.where()}"
      return ready()

    self._members.wait(checked, what, seconds)

  def wait_for_all(self, after, seconds=240.0):
    """Waits until each has taken a step since, together with all others."""
    everyone = range(self.count)
    self.wait(
      lambda: all(r.steps_of(*everyone, after=after) for r in self.replicas),
      "not all take part",
      seconds,
    )

  def victims(self, target):
    """The hosts on both sides of a cut that concerns a target."""
    everyone = range(self.count + 1)
    match target:
      case "replica":
        some = [self.count - 1]
      case "coordinator":
        some = [self.count]
      case "two replicas":
        return [self.count - 2], [self.count - 1]
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
    everyone = range(self.count)
    back = max(
      one.steps_of(*everyone, after=healed)[0]["at"] for one in self.replicas
    )
    return Outcome(self.longest_stall(began, back), back - healed)

  def vanish(self, seconds):
    """Removes a host permanently; returns the stall of the others."""
    (gone,), _ = self.victims("replica")
    began = time.monotonic()
    self.hosts.vanish(gone)
    one = self.replicas.pop(gone)
    rest = [r.replica for r in self.replicas]
    self.wait(
      lambda: all(r.steps_of(*rest, after=began) for r in self.replicas),
      "the others don't go on",
      seconds,
    )
    stall = self.longest_stall(began, time.monotonic())
    self._members.kill(one)
    return stall

  def longest_stall(self, since, until):
    """The longest time in which no replica has taken a step."""
    times = sorted(s["at"] for one in self.replicas for s in one.steps)
    inside = [t for t in times if since < t < until]
    marks = [since, *inside, until]
    return max(b - a for a, b in itertools.pairwise(marks))

  def wait_for_steps(self, more, seconds=240.0):
    """Waits until the first replica has taken that many more steps."""
    began, steps = time.monotonic(), self.replicas[0].steps
    self.wait(
      lambda: sum(s["at"] > began for s in steps) >= more,
      f"no {more} steps",
      seconds,
    )

  def rate(self, seconds):
    """Steps per second, from now on for so long."""
    began = time.monotonic()
    self._sleep(seconds)
    return sum(s["at"] > began for s in self.replicas[0].steps) / seconds

  def cut_repeatedly(self, times, seconds, healed):
    """Cuts one replica's host off, again and again."""
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
    self._members.tell(do="finish")
    ended = lambda: all(
      one.result is not None and one.process.exit_code == 0
      for one in self.replicas
    )
    self._members.wait(ended, "no end", 240.0)
    reports = [(one.replica, 0, one.result) for one in self.replicas]
    result, wrong = read_journal(self.journal)
    steps, problems = checks.check(result, reports, TIMEOUT)
    problems += [one.result["error"] for one in self.replicas]
    problems += ["the journal has a bad line"] * len(wrong)
    return steps, [*filter(None, problems), *self._members.end()]

  def _sleep(self, seconds):
    """Waits, unless a replica ends."""
    end = time.monotonic() + seconds
    self.wait(lambda: time.monotonic() >= end, "a cut", seconds + 60.0)
