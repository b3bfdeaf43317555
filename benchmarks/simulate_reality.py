"""The simulator against the coordinator: predicted and measured steps per second.

Real processes, which sleep instead of computing, so that a few cores suffice for
them. Each row runs twice: the journal of the first run predicts the pace of the
second (goal: 10 %). Other rows are predicted from the journals of runs with another k
(goal: 15 %). Kills and stops strike at random times; a process that was killed is
replaced by another one after a while. One row is a script of a user's, started by
`optax-dist launch`; others run on two hosts, network namespaces that this program
makes.

    python benchmarks/simulate_reality.py [--steps N] [--scale SECONDS]
      [--rows NAME ...] [--keep FOLDER [--record RUNS]]

With --keep a run whose journal is in the folder is not done again, so that rows can be
measured one by one: --record does some of the runs that are missing, and no more.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time

REPLICAS = 4
SECRET = "OPTAX_DIST_SECRET"
ROOT = pathlib.Path(__file__).parents[1]
PORT = 29350


def settings():
  """What runs, by name; those with `of` are predicted from the rows named there."""
  base = {"k": 4, "latency": "gamma:4,0.25"}
  tail = {"k": 3, "latency": "lognormal:-0.3,0.8"}
  small, large = (base | {"params": p} for p in (200_000, 1_000_000))
  return {
    "k = N": base,
    "k < N": tail,
    "k > N": base | {"k": 6},
    "elastic, period 5": base | {"strategy": "elastic", "k": None},
    "local updates, period 5": base | {"strategy": "local"},
    "k = N, kills": base | {"kills": 3},
    "k < N, kills": tail | {"kills": 3},
    "k < N, stops": tail | {"stops": 12},
    "uneven replicas": base | {"uneven": True},
    "a script by launch": {"script": True, "k": 4},
    "k = N, 2 hosts, 20 ms": base | {"delay": 0.01},
    "k < N, 2 hosts, 20 ms": tail | {"delay": 0.01},
    "0.8 MB": small,
    "4 MB": large,
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
    gradient = np.ones(job["params"], np.float32)
    with (
      # A replica that comes back after the end finds no run.
      contextlib.suppress(coordinator.RunFinished),
      coordinator.join(
        optax.sgd(0.1), np.zeros_like(gradient), strategy=made, **job["join"]
      ) as replica,
    ):
      first, number = True, 0
      while replica.global_step < job["steps"] and not replica.finished:
        seconds = job["scale"] * float(latency.draw(rng, 1)[0])
        if job["uneven"]:
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

  def __init__(self, secret, within):
    self.popen = subprocess.Popen(
      [*within, sys.executable, __file__, "--work"],
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
  """Workers, and a coordinator for all their runs; on two hosts if there is a delay."""

  def __init__(self, args, delay):
    self.args, self.secret = args, secrets.token_hex()
    self.server = self.hosts = None
    if delay:
      sys.path.insert(0, str(ROOT / "tests" / "helpers" / "networks"))
      import hosts

      if why := hosts.not_permitted():
        raise SystemExit(f"No hosts can be made here: {why}.")
      self.hosts = hosts.Hosts(2)
      self.hosts.shape(delay=delay)
    else:
      from optax_dist.coordinator.server import process

      self.server = process.start(self.secret.encode(), port=0)
    self.workers = []
    self.fill()

  def fill(self):
    """Starts as many workers as a run needs, with two to spare."""
    while len(self.workers) < REPLICAS + 2:
      self.start()
    for worker in self.workers:
      if not worker.wait("ready", 1, 180.0):
        raise RuntimeError("a process did not start")

  def start(self):
    within = []
    if self.hosts:
      name = self.hosts.names[len(self.workers) % 2]
      within = ["ip", "netns", "exec", name]
    self.workers.append(Worker(self.secret, within))
    return self.workers[-1]

  def end(self):
    for worker in self.workers:
      worker.end()
    if self.server:
      self.server.stop()
    if self.hosts:
      self.hosts.close()

  def where(self, replica):
    """How a replica finds the coordinator, which the first one starts on its host."""
    if self.server:
      return {"coordinator_address": self.server.address}
    return {
      "coordinator_address": f"{self.hosts.address(0)}:{PORT}",
      "start_coordinator": replica == 0,
    }

  def run(self, setting, seed, path):
    """Runs a setting, with its journal in a file."""
    faults = setting.get("kills", 0) + setting.get("stops", 0)
    # Given for 200 steps: a longer run meets more of them, not rarer ones.
    faults = round(faults * self.args.steps / 200)
    job = {
      "seed": seed,
      "latency": setting["latency"],
      "strategy": setting.get("strategy"),
      "params": setting.get("params", 64),
      "uneven": bool(setting.get("uneven")),
      "scale": self.args.scale,
      # Elastic exchanges are steps of one replica each.
      "steps": self.args.steps * (3 if setting["k"] is None else 1),
    }
    shared = {
      "total_num_replicas": REPLICAS,
      "run": f"run-{secrets.token_hex(4)}",
      "journal": str(path),
      "timeout": 60.0,
      "silence_timeout": 2.0,
      "lower_on_loss": False,
    }
    if setting["k"] is not None:
      shared["replicas_to_aggregate"] = setting["k"]

    def give(replica, worker, seed):
      join = shared | {"replica": replica} | self.where(replica)
      worker.give(job | {"join": join, "seed": seed})

    free = list(self.workers)
    places = {i: free.pop(0) for i in range(REPLICAS)}
    dones = {id(w): w.said.count("done") for w in self.workers}
    for i, worker in places.items():
      give(i, worker, seed)
    rng = random.Random(seed)
    usual = self.args.steps * self.args.scale * 1.8
    times = sorted(rng.uniform(0.1, 0.9) * usual for _ in range(faults))
    begin = time.monotonic()
    replacing: dict[int, threading.Thread] = {}

    def replace(victim):
      time.sleep(10 * self.args.scale)
      if free:
        spare = free.pop(0)
      else:
        spare = self.start()
        spare.wait("ready", 1, 180.0)
        dones[id(spare)] = 0
      places[victim] = spare
      give(victim, spare, seed + 1000)

    for at in times:
      while time.monotonic() - begin < at + 1.0:
        time.sleep(0.02)
      # Does not wait for the last one to be back, as failures don't either.
      up = [
        i for i in places if i not in replacing or not replacing[i].is_alive()
      ]
      if not up:
        continue
      victim = rng.choice(up)
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
      replacing[victim] = threading.Thread(target=replace, args=(victim,))
      replacing[victim].start()
    for thread in replacing.values():
      thread.join(200.0)
    for worker in places.values():
      if not worker.wait("done", dones[id(worker)] + 1, 240.0):
        raise RuntimeError("a replica did not end")


def launch(args, path):
  """Runs a user's script by `optax-dist launch`, with its journal in a file."""
  with tempfile.TemporaryDirectory() as folder:
    output = pathlib.Path(folder, "run")
    subprocess.run(
      [
        *(sys.executable, "-m", "optax_dist", "launch"),
        *("--replicas", str(REPLICAS), "--output", str(output)),
        str(ROOT / "examples" / "launched_k_of_n.py"),
        *("--steps", str(args.steps), "--pause", str(args.scale)),
      ],
      env=os.environ | {"JAX_PLATFORMS": "cpu"},
      check=True,
      timeout=240,
      stdout=subprocess.DEVNULL,
    )
    path.write_bytes((output / "journal.jsonl").read_bytes())


class Runs:
  """The runs so far: journals in a folder."""

  def __init__(self, folder, args):
    self.folder, self.args = folder, args
    self._machines = {}
    self.done = 0

  def records(self, name, number):
    """The journal of a row's first or second run, which is done if need be."""
    from optax_dist.coordinator import journal

    setting = settings()[name]
    for sign, word in {"=": "is", "<": "below", ">": "above"}.items():
      name = name.replace(sign, word)
    path = self.folder / (re.sub(r"\W+", "-", f"{name} {number}") + ".jsonl")
    if not path.exists():
      partial = path.with_suffix(".part")
      partial.unlink(missing_ok=True)
      if setting.get("script"):
        launch(self.args, partial)
      else:
        self._machine(setting).run(setting, number, partial)
      partial.rename(path)
      self.done += 1
    return journal.read(path).records

  def _machine(self, setting):
    delay = setting.get("delay", 0.0)
    if delay not in self._machines:
      self._machines[delay] = Machine(self.args, delay)
    self._machines[delay].fill()
    return self._machines[delay]

  def end(self):
    for machine in self._machines.values():
      machine.end()


def predict(name, runs):
  """What is predicted for a row, and what was measured."""
  from optax_dist import simulate

  setting = settings()[name]
  first = runs.records(setting.get("of", name), 1)
  again = simulate.from_journal(runs.records(name, 2))
  recorded = simulate.from_journal(first)
  strategy = recorded.strategy
  if "of" in setting:
    strategy = strategy._replace(replicas_to_aggregate=setting["k"])
  result = simulate.predict(recorded, strategy, REPLICAS)
  return result, again.steps_per_second


def line(name, found, measured):
  """A row of the table."""
  inside = found.low <= measured <= found.high
  return (
    f"{name:26} {measured:9.2f} {found.steps_per_second:9.2f} "
    f" {found.low:7.2f} to {found.high:7.2f} {'in ' if inside else 'out'}"
    f" {found.steps_per_second / measured - 1:+7.1%}"
  )


def main():
  """Measures all."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--steps", type=int, default=200)
  parser.add_argument(
    "--scale", type=float, default=0.04, help="seconds that a unit lasts"
  )
  parser.add_argument("--rows", nargs="+", choices=settings(), metavar="NAME")
  parser.add_argument("--keep", type=pathlib.Path, help="folder for journals")
  parser.add_argument("--record", type=int, help="so many missing runs only")
  parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.work:
    work()
    return
  print(
    f"{REPLICAS} processes, {args.steps} steps; load"
    f" {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
  )
  with tempfile.TemporaryDirectory() as folder:
    runs = Runs(args.keep or pathlib.Path(folder), args)
    try:
      if args.record:
        for name in args.rows or settings():
          setting = settings()[name]
          for number in (2,) if "of" in setting else (1, 2):
            runs.records(name, number)
            if runs.done == args.record:
              return
        return
      print(
        f"{'':26} {'measured':>9} {'predicted':>9}  95 % interval           error"
      )
      for name in args.rows or settings():
        result, measured = predict(name, runs)
        print(line(name, result, measured), flush=True)
        for warning in result.warnings:
          print(f"    {warning}")
    finally:
      runs.end()


if __name__ == "__main__":
  main()
