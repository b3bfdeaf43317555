"""The simulator against the coordinator: predicted and measured steps per second.

Real processes on loopback, which sleep instead of computing, so that a few cores
suffice for them. Each setting runs twice: the journal of the first run predicts the
pace of the second (goal: 10 %), and its first half the second half. Then the journal of
k of N predicts other k, which are measured too (goal: 15 %). Kills and stops strike at
random times; a process that was killed is replaced by another one after a while.

    python benchmarks/simulate_reality.py [--steps N] [--scale SECONDS]
      [--rows NAME ...] [--keep FOLDER]
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time

REPLICAS = 4
SECRET = "OPTAX_DIST_SECRET"


def settings():
  """Name, k, strategy, latency, faults; those with `of` are predicted from it."""
  base = {"k": 4, "latency": "gamma:4,0.25"}
  tail = {"k": 3, "latency": "lognormal:-0.3,0.8"}
  return {
    "k = N": base,
    "k < N": tail,
    "k > N": base | {"k": 6},
    "elastic, period 5": base | {"strategy": "elastic", "k": None},
    "local updates, period 5": base | {"strategy": "local"},
    "k = N, kills": base | {"kills": 4},
    "k < N, kills": tail | {"kills": 4},
    "k < N, stops": tail | {"stops": 6},
    "a script of the user's": base | {"script": True, "k": 4},
    "3 of 4 -> 4 of 4": tail | {"k": 4, "of": "k < N"},
    "3 of 4 -> 2 of 4": tail | {"k": 2, "of": "k < N"},
    "4 of 4 -> 3 of 4": base | {"k": 3, "of": "k = N"},
    "4 of 4 -> 6 of 4": base | {"k": 6, "of": "k = N"},
  }


# A replica's process.


def work():
  """Takes part in one run for each line of standard input."""
  import numpy as np
  import optax

  from optax_dist import coordinator, simulate
  from optax_dist.coordinator import strategies

  print("ready", flush=True)
  for line in sys.stdin:
    job = json.loads(line)
    rng = np.random.default_rng([job["seed"], job["join"]["replica"]])
    latency = simulate.parse_latency(job["latency"])
    made = {
      None: lambda: None,
      "elastic": lambda: strategies.elastic_average(
        moving_rate=0.1, communication_period=5
      ),
      "local": lambda: strategies.local_updates(communication_period=5),
    }[job["strategy"]]()
    gradient = np.ones(64, np.float32)
    with (
      # Who comes back after the end finds no run.
      contextlib.suppress(coordinator.RunFinished),
      coordinator.join(
        optax.sgd(0.1), np.zeros(64, np.float32), strategy=made, **job["join"]
      ) as replica,
    ):
      first, number = True, 0
      while replica.global_step < job["steps"] and not replica.finished:
        seconds = job["scale"] * float(latency.draw(rng, 1)[0])
        if job["script"]:
          # Data come in bursts, and one replica evaluates now and then.
          seconds *= 2.5 if number // 25 % 3 == 2 else 1.0
          late = job["join"]["replica"] == 0 and number % 20 == 19
          seconds += 8 * job["scale"] * late + 1.0 * first
        first, number = False, number + 1
        time.sleep(seconds)
        replica.step(gradient)
      if not replica.finished:
        replica.finish()
    print("done", flush=True)


class Worker:
  """A process that takes part in runs."""

  def __init__(self, secret):
    self.popen = subprocess.Popen(
      [sys.executable, __file__, "--work"],
      env=os.environ | {SECRET: secret, "JAX_PLATFORMS": "cpu"},
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      text=True,
    )
    self.said, self.heard = [], threading.Condition()
    threading.Thread(target=self._listen, daemon=True).start()

  def _listen(self):
    for line in self.popen.stdout:
      with self.heard:
        self.said.append(line.strip())
        self.heard.notify_all()

  def wait(self, word, times, seconds):
    """Whether it has said a word so often."""
    enough = lambda: self.said.count(word) >= times
    with self.heard:
      return self.heard.wait_for(enough, seconds)

  def give(self, job):
    self.popen.stdin.write(json.dumps(job) + "\n")
    self.popen.stdin.flush()

  def end(self):
    self.popen.kill()
    self.popen.wait()


# The runs.


class Machine:
  """Workers, and a store for all their runs."""

  def __init__(self, folder, args):
    from optax_dist.coordinator.store import process

    self.folder, self.args = folder, args
    self.secret = secrets.token_hex()
    self.store = process.start(self.secret.encode(), port=0)
    self.workers = [Worker(self.secret) for _ in range(REPLICAS + 2)]
    self.runs = 0
    for worker in self.workers:
      if not worker.wait("ready", 1, 180.0):
        raise RuntimeError("a process did not start")

  def end(self):
    for worker in self.workers:
      worker.end()
    self.store.stop()

  def run(self, setting, seed):
    """Runs a setting, and returns the journal's records."""
    from optax_dist.coordinator import journal

    self.runs += 1
    path = self.folder / f"{os.getpid()}-{self.runs}.jsonl"
    faults = setting.get("kills", 0) + setting.get("stops", 0)
    job = {
      "seed": seed,
      "latency": setting["latency"],
      "strategy": setting.get("strategy"),
      "script": bool(setting.get("script")),
      "scale": self.args.scale,
      # Elastic exchanges are steps of one replica each.
      "steps": self.args.steps * (3 if setting["k"] is None else 1),
    }
    shared = {
      "coordinator_address": self.store.address.partition(",")[0],
      "total_num_replicas": REPLICAS,
      "run": f"run-{self.runs}",
      "journal": str(path),
      "timeout": 60.0,
      "leader_timeout": 2.0,
      "lower_on_loss": False,
    }
    if setting["k"] is not None:
      shared["replicas_to_aggregate"] = setting["k"]
    free = list(self.workers)
    places = {i: free.pop(0) for i in range(REPLICAS)}
    dones = {id(w): w.said.count("done") for w in self.workers}
    for i, worker in places.items():
      worker.give(job | {"join": shared | {"replica": i}})
    rng = random.Random(seed)
    usual = self.args.steps * self.args.scale * 1.8
    times = sorted(rng.uniform(0.1, 0.9) * usual for _ in range(faults))
    begin = time.monotonic()
    for at in times:
      while time.monotonic() - begin < at + 1.0:
        time.sleep(0.02)
      victim = rng.randrange(REPLICAS)
      worker = places[victim]
      if worker.said.count("done") > dones[id(worker)]:
        break
      if setting.get("stops"):
        worker.popen.send_signal(signal.SIGSTOP)
        time.sleep(10 * self.args.scale)
        worker.popen.send_signal(signal.SIGCONT)
        continue
      worker.end()
      self.workers.remove(worker)
      time.sleep(10 * self.args.scale)
      if not free:
        free.append(Worker(self.secret))
        self.workers.append(free[-1])
        free[-1].wait("ready", 1, 180.0)
        dones[id(free[-1])] = 0
      places[victim] = free.pop(0)
      places[victim].give(
        job | {"join": shared | {"replica": victim}, "seed": seed + 1000}
      )
    for worker in places.values():
      if not worker.wait("done", dones[id(worker)] + 1, 240.0):
        raise RuntimeError("a replica did not end")
    while len(self.workers) < REPLICAS + 2:
      self.workers.append(Worker(self.secret))
      self.workers[-1].wait("ready", 1, 180.0)
    return journal.read(path).records


def main():
  """Measures all."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--steps", type=int, default=200)
  parser.add_argument(
    "--scale", type=float, default=0.04, help="seconds that a unit lasts"
  )
  parser.add_argument("--rows", nargs="+", help="names of settings")
  parser.add_argument("--keep", type=pathlib.Path, help="folder for journals")
  parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.work:
    work()
    return
  from optax_dist import simulate

  chosen = {
    name: setting
    for name, setting in settings().items()
    if not args.rows or name in args.rows
  }
  print(
    f"{REPLICAS} processes, {args.steps} steps; load"
    f" {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
  )
  print(
    f"{'':26} {'measured':>9} {'predicted':>9}  95 % interval        error"
    "  held out"
  )
  first = {}
  with tempfile.TemporaryDirectory() as folder:
    machine = Machine(args.keep or pathlib.Path(folder), args)
    try:
      for name, setting in chosen.items():
        source = setting.get("of")
        if source is None:
          records = machine.run(setting, 1)
          first[name] = records
        elif source not in first:
          records = first[source] = machine.run(settings()[source], 1)
        else:
          records = first[source]
        again = simulate.from_journal(machine.run(setting, 2))
        recorded = simulate.from_journal(records)
        strategy = recorded.strategy
        if source is not None:
          strategy = strategy._replace(replicas_to_aggregate=setting["k"])
        found = simulate.predict(recorded, strategy, REPLICAS)
        measured = again.steps_per_second
        held = simulate.held_out(records) if source is None else None
        told = "" if held is None else f"{held.error:+7.1%}"
        inside = found.low <= measured <= found.high
        print(
          f"{name:26} {measured:9.2f} {found.steps_per_second:9.2f} "
          f" {found.low:7.2f} to {found.high:7.2f}"
          f" {'in ' if inside else 'out'}"
          f" {found.steps_per_second / measured - 1:+7.1%} {told}",
          flush=True,
        )
        for doubt in found.doubts:
          print(f"    {doubt}")
    finally:
      machine.end()
  print(f"load {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
  main()
