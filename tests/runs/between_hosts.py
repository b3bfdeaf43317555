"""Replicas and their coordinator on separate hosts, whose network is cut.

One run goes on while its network is cut and heals, again and again; at its end
all is checked.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time

import hosts as host_maker

from tests.runs import checks, models
from tests.runs.processes import Processes
from tests.runs.replica import Job

TARGETS = ("replica", "coordinator", "two replicas")
SILENCE_TIMEOUT, TRANSFER_TIMEOUT, TIMEOUT = 4.0, 4.0, 60.0
# For a busy machine, beyond what time-outs say.
SLACK = 6.0
# Seconds for what takes long on a busy machine.
_LONG = 240.0


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
  target: str, seconds: float, outcome: Outcome, slack: float = SLACK
) -> list[str]:
  """What of a cut took longer than the time-outs allow.

  Nobody goes on without the coordinator. Otherwise a peer that is silent is given
  up after `silence_timeout`, and so is an exchange, after `transfer_timeout`.
  """
  allowed = seconds
  if target != "coordinator":
    allowed = min(seconds, SILENCE_TIMEOUT + TRANSFER_TIMEOUT)
  late = []
  if outcome.stall > allowed + slack:
    late.append(f"{target}: stood still {outcome.stall:.1f} s")
  if outcome.back > SILENCE_TIMEOUT + slack:
    late.append(f"{target}: all were back after {outcome.back:.1f} s")
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
    timeout: the run's, longer than any cut.
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
    timeout=TIMEOUT,
    **options,
  ):
    self._timeout = timeout
    self.count, self._delay, self._method = count, delay, method
    self._pauses = [(pauses or {}).get(i, pause) for i in range(count)]
    self._folder, self._version = folder / "run", version
    self._job = Job(
      functools.partial(models.flat, width),
      {
        "total_num_replicas": count,
        "lower_on_loss": True,
        "timeout": timeout,
        "transfer_timeout": TRANSFER_TIMEOUT,
        "silence_timeout": SILENCE_TIMEOUT,
        **options,
      },
    )

  def __enter__(self):
    self.hosts = host_maker.Hosts(self.count + 1)
    *names, last = self.hosts.names
    self.run = Processes(
      self._folder,
      self._job,
      method=self._method,
      hosts=names,
      coordinator=(last, self.hosts.address(self.count, self._version)),
    )
    try:
      if self._delay:
        self.hosts.shape(delay=self._delay)
      self._start()
    except BaseException:
      self.__exit__()
      raise
    return self

  def __exit__(self, *_):
    self.run.end()
    self.hosts.close()

  @property
  def journal(self):
    """The file."""
    return self.run.journal

  @property
  def replicas(self):
    """Those that have not vanished."""
    return [one for one in self.run.everyone if not one.doomed]

  def _start(self):
    for number, pause in enumerate(self._pauses):
      self.run.job = dataclasses.replace(self.run.job, pause=pause)
      self.run.start(number)
    joined = lambda: all(one.joined for one in self.replicas)
    self.run.wait(joined, "not all join", _LONG)

  def wait_for_all(self, after):
    """Waits until each has taken a step since, together with all others."""
    all_of = [one.replica for one in self.replicas]
    self.run.wait(
      lambda: all(r.steps_of(*all_of, after=after) for r in self.replicas),
      "not all take part",
      _LONG,
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
    began = time.monotonic()
    self.hosts.cut(*self.victims(target), both=both)
    self.run.sleep(seconds)
    healed = time.monotonic()
    self.hosts.heal()
    self.wait_for_all(healed)
    everyone = range(self.count)
    back = max(
      one.steps_of(*everyone, after=healed)[0]["at"] for one in self.replicas
    )
    return Outcome(self.longest_stall(began, back), back - healed)

  def vanish(self):
    """Removes a host permanently; returns the stall of the others."""
    (number,), _ = self.victims("replica")
    began = time.monotonic()
    self.hosts.vanish(number)
    # Killed only then: nobody hears its last words.
    self.run.kill(self.run.everyone[number])
    self.wait_for_all(began)
    return self.longest_stall(began, time.monotonic())

  def longest_stall(self, since, until):
    """The longest time in which no replica has taken a step."""
    times = sorted(s["at"] for one in self.replicas for s in one.steps)
    between = [t for t in times if since < t < until]
    marks = [since, *between, until]
    return max(b - a for a, b in itertools.pairwise(marks))

  def wait_for_steps(self, more):
    """Waits until the first replica has taken that many more steps."""
    began, steps = time.monotonic(), self.replicas[0].steps
    self.run.wait(
      lambda: sum(s["at"] > began for s in steps) >= more,
      f"no {more} steps",
      _LONG,
    )

  def rate(self, seconds):
    """Steps per second, from now on for so long."""
    began = time.monotonic()
    self.run.sleep(seconds)
    return sum(s["at"] > began for s in self.replicas[0].steps) / seconds

  def cut_repeatedly(self, times, seconds, healed):
    """Cuts one replica's host off, again and again."""
    self.wait_for_all(time.monotonic())
    for _ in range(times):
      self.hosts.cut(*self.victims("replica"))
      self.run.sleep(seconds)
      self.hosts.heal()
      self.run.sleep(healed)
    self.wait_for_all(time.monotonic())

  def finish(self):
    """Has the run end; returns how many steps it had, and what is wrong."""
    self.run.finish()
    contents = self.run.records()
    steps, problems = checks.check(
      contents.records, self.run.reports(), self._timeout
    )
    problems += ["the journal has a bad line"] * len(contents.problems)
    self.run.end()
    return steps, problems + self.run.problems
