"""How often deadlines that follow what is seen are wrong, and how long they take.

Steps are lognormal(0, 0.6), with and without bursts of ten that take ten times as
long; the first ones compile. Three places: the rule alone, the simulation's world, and
real processes, one of which is stopped:

  python benchmarks/coordinator/deadlines.py --where rule world processes
"""

import argparse
import json
import math
import os
import pathlib
import signal
import statistics
import sys
import tempfile
import threading
import time

import numpy as np

from optax_dist.coordinator import journal
from optax_dist.coordinator.launch import (
  environment,
  launcher,
  placement,
  supervisor,
)
from optax_dist.coordinator.protocol import liveness

_STEPS = 2000
_BURST, _BETWEEN = 10, 200


def times(rng, count, bursts):
  """Seconds of steps, the first two of which compile."""
  result = rng.lognormal(0.0, 0.6, count)
  at = int(rng.exponential(_BETWEEN)) if bursts else count
  while at < count:
    result[at : at + _BURST] *= 10.0
    at += _BURST + int(rng.exponential(_BETWEEN))
  return np.concatenate([rng.uniform(20.0, 55.0, 2), result]).tolist()


class Normal:
  """As Akka: phi above 8 of a normal distribution, 3 s of pause, 1,000 gaps."""

  def __init__(self):
    self._seen = [0.75, 1.25]

  def add(self, seconds):
    self._seen = [*self._seen[-999:], seconds]

  @property
  def deadline(self):
    mean, sd = statistics.fmean(self._seen), statistics.pstdev(self._seen)
    return mean + 3.0 + 5.612 * max(sd, 0.1)


class Exponential(Normal):
  """As Cassandra: phi above 8 of an exponential distribution."""

  @property
  def deadline(self):
    return statistics.fmean(self._seen) * 8.0 * math.log(10.0)


def rule(args):
  """The rule alone, in virtual time, next to others."""
  kinds = {
    "a percentile (ours)": lambda: liveness.Silence(
      liveness.Rule(floor=0.01, first=60.0, ceiling=1e4)
    ),
    "normal (Akka)": Normal,
    "exponential (Cassandra)": Exponential,
  }
  for bursts in (False, True):
    for name, make in kinds.items():
      rng = np.random.default_rng(args.seed)
      false = compiling = 0
      ratios = []
      for _ in range(args.replicas):
        seen, durations = make(), times(rng, _STEPS, bursts)
        percentile = np.quantile(durations[2:], 0.99)
        for number, seconds in enumerate(durations):
          late = seconds > seen.deadline
          false += late and number >= 2
          compiling += late and number < 2
          seen.add(seconds)
        ratios.append(seen.deadline / percentile)
      yield {
        "where": "rule",
        "rule": name,
        "bursts": bursts,
        "false_per_step": false / args.replicas / _STEPS,
        "false_compilations": compiling / args.replicas / 2,
        "stopped_out_in_p99": statistics.median(ratios),
        "stopped_out_in_p99_worst": max(ratios),
      }


def world(args):
  """The simulation's world: event loops beat late, by lognormal times."""
  sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))
  from tests.simulation import invariants
  from tests.simulation import world as worlds

  class Late(worlds.World):
    """Delays heartbeats as much as steps vary; counts lost replicas."""

    late: dict
    out: list
    false = beats = 0
    bursts = False

    def beat(self, process):
      if process.alive and process.paused_until <= self.now:
        lag = next(self.late.setdefault(process.name, self.lags()))
        self.at(self.now + lag, super().beat, process)
      elif process.alive:
        self.at(process.paused_until, self.beat, process)

    def lags(self):
      rng = np.random.default_rng([self.seed, len(self.late)])
      yield 0.1
      yield rng.uniform(5.0, 25.0)  # A compilation holds Python's lock.
      while True:
        yield from (0.2 * s for s in times(rng, _STEPS, self.bursts)[2:])

    def hear(self, process, peer):
      last = process.heard.get(peer.name)
      self.beats += 1
      if last is not None and self.now - last > self.silence(process, peer):
        self.false += 1
      super().hear(process, peer)

    def lose(self, connection, end, how, reason):
      peer = connection.other(end)
      notices = connection.open[end.name] and end.paused_until <= self.now
      if how == "silent" and peer.paused_until > self.now and notices:
        self.out.append(self.now - self.stopped_at)
      super().lose(connection, end, how, reason)

  for bursts in (False, True):
    false = beats = 0
    outs, gaps = [], []
    for seed in range(args.seed, args.seed + 5):
      setting = worlds.Setting(
        replicas=3, needed=2, steps=500, compute=(1.0,) * 8, adaptive=True
      )
      one = Late(setting, seed)
      one.late, one.out, one.bursts, one.stopped_at = {}, [], bursts, 400.0
      one.checker = invariants.Checker(one)
      one.run(400.0, lambda: False)
      stopped = one.all[1]
      seen = [
        p.gaps[stopped.name].quantile
        for p in one.all
        if p is not stopped and stopped.name in p.gaps
      ]
      one.pause(stopped, 200.0)
      one.run(500.0, lambda: False)
      false, beats = false + one.false, beats + one.beats
      outs += one.out
      gaps += [max(3 * q, 5.0) for q in seen if q]
    yield {
      "where": "world",
      "bursts": bursts,
      "heartbeats": beats,
      "false_per_heartbeat": false / beats,
      "stopped_out_seconds": statistics.median(outs),
      "three_p99_or_floor_seconds": statistics.median(gaps),
    }


def processes(args):
  """Three processes, one of which is stopped after a while."""
  command = [sys.executable, __file__, "--replica", str(args.seconds)]
  pids, lost = {}, []

  def echo(label, line, error):
    if line.startswith("pid "):
      pids[int(label.split()[-1])] = int(line.split()[-1])

  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, "journal.jsonl")

    def stop():
      time.sleep(args.seconds)
      os.kill(pids[2], signal.SIGSTOP)
      began = time.monotonic()
      while time.monotonic() < began + 70.0 and not lost:
        time.sleep(0.05)
        records = journal.read(path).records
        if any(r["kind"] == "lost" and r["replica"] == 2 for r in records):
          lost.append(time.monotonic() - began)
      os.kill(pids[2], signal.SIGCONT)

    stopper = threading.Thread(target=stop)
    stopper.start()
    launcher.Launcher(
      command,
      placement.Placement(3),
      supervisor.Policy(restarts=0),
      folder=pathlib.Path(folder, "logs"),
      environment=environment.Environment(
        journal=str(path), replicas_to_aggregate=3, min_replicas=1
      ),
      env={"JAX_PLATFORMS": "cpu"},
      echo=echo,
    ).run()
    stopper.join()
    records = journal.read(path).records
  computed = [
    m["compute"]
    for r in records
    if r["kind"] == "commit"
    for m in r["members"]
    if m["replica"] == 2
  ]
  gone = [r for r in records if r["kind"] == "lost"]
  yield {
    "where": "processes",
    "steps": sum(r["kind"] == "commit" for r in records),
    "false": len(gone) - bool(lost),
    "stopped_out_seconds": lost[0] if lost else None,
    "own_p99_seconds": float(np.quantile(computed, 0.99)),
  }


def replica(seconds):
  """One of the processes: steps that take lognormal times."""
  import optax

  from optax_dist import coordinator

  ones = np.ones(8, np.float32)
  rng = np.random.default_rng(os.getpid())
  with coordinator.join(optax.sgd(0.1), ones) as one:
    print("pid", os.getpid(), flush=True)
    end = time.monotonic() + seconds + 20.0
    while time.monotonic() < end and not one.finished:
      time.sleep(float(rng.lognormal(0.0, 0.6)) * 0.5)
      one.step(ones)
    if not one.finished:
      one.finish()


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  places = {"rule": rule, "world": world, "processes": processes}
  parser.add_argument(
    "--where", nargs="+", choices=places, default=["rule", "world"]
  )
  parser.add_argument("--replicas", type=int, default=40)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--seconds", type=float, default=45.0)
  parser.add_argument("--replica", type=float, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.replica is not None:
    replica(args.replica)
    return
  for where in args.where:
    for line in places[where](args):
      print(json.dumps(line), flush=True)


if __name__ == "__main__":
  main()
