r"""What a run keeps of its replicas' time while processes are killed again and again.

Replicas are started, and started again, by `optax-dist launch`. Their gradients
sleep, so that a machine with few cores is enough, and what is not there frees
nothing for the others. In turn one replica, the coordinator, two or three replicas
at once, or the coordinator with a replica get SIGKILL:

  python benchmarks/coordinator/goodput.py --replicas 8 --gradient 1
  python benchmarks/coordinator/goodput.py --replicas 8 --gradient 5 --strategy diloco
  python benchmarks/coordinator/goodput.py --replicas 8 --gradient 1 --standby 1
  python benchmarks/coordinator/goodput.py --replicas 4 --gradient 30 \
    --strategy deterministic

`kept` and `bound` are those of `optax-dist report`, from the first strike on. `stall`
is by how much the step of a strike, or the one after it, was longer than a usual one.
The parts of the time to be back are measured in the process that is back. All other
times are the journal's, which must not fall behind as the coordinator starts again.
"""

import argparse
import itertools
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time

BORN = time.time()
# Whom strikes kill: so many replicas, and perhaps the coordinator.
_STRIKES = ((1, 0), (1, 0), (0, 1), (1, 0), (2, 0), (1, 1), (1, 0), (3, 0))
_PERIOD = 10
_COORDINATOR = b"optax_dist.coordinator.server"
_STRATEGIES = ("sync", "diloco", "decoupled", "deterministic")
# Micro-batches of a step, for each replica.
_SLOTS = 32


# A replica.


def started():
  """When this process was started, by the clock of `time.time`."""
  ticks = int(pathlib.Path("/proc/self/stat").read_text().split()[21])
  boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
  return boot + ticks / os.sysconf("SC_CLK_TCK")


def train(args):
  """One replica, until the driver's file says that the time is over."""
  import jax
  import jax.numpy as jnp
  import optax

  from optax_dist import coordinator

  imported = time.time()
  params = {"w": jnp.zeros((args.size,))}
  gradient = jax.jit(jax.grad(lambda p, x: jnp.mean((p["w"] - x) ** 2)))
  jax.block_until_ready(gradient(params, 1.0))
  compiled = time.time()
  strategy, opt, pause, data = None, optax.adam(0.01), args.gradient, {}
  if args.strategy == "diloco":
    strategy = coordinator.local_updates(
      optax.sgd(0.7, momentum=0.9, nesterov=True), communication_period=_PERIOD
    )
    pause /= _PERIOD
  elif args.strategy == "decoupled":
    strategy = coordinator.decoupled_diloco(
      optax.sgd(0.7, momentum=0.9, nesterov=True), period=_PERIOD, fragments=1
    )
    pause /= _PERIOD
  elif args.strategy == "deterministic":
    batch = _SLOTS * args.replicas
    batches = coordinator.Batches(
      batch, batch, micro_batch=1, deterministic=True, epochs=10_000
    )
    data = {"data": batches, "probe": None}
    pause /= _SLOTS
  with coordinator.join(
    opt,
    params,
    strategy=strategy,
    **data,
    silence_timeout=10.0,
    timeout=120.0,
  ) as replica:
    joined, counted = time.time(), None
    slots = replica.micro_batches() if data else itertools.repeat(None)
    for _ in slots:
      if replica.finished:
        break
      grads = gradient(replica.params, float(replica.replica))
      time.sleep(pause)
      outcome = replica.step(grads)
      if counted is None and (outcome.members or args.strategy == "decoupled"):
        counted = time.time()
        times = {
          "replica": replica.replica,
          "started": started(),
          "python": BORN,
          "imported": imported,
          "compiled": compiled,
          "joined": joined,
          "counted": counted,
        }
        with (args.folder / "back.jsonl").open("a") as file:
          file.write(json.dumps(times) + "\n")
      if (args.folder / "over").exists() and not replica.finished:
        replica.finish()
    result = {"step": replica.global_step, "params": replica.fingerprint()}
  path = args.folder / f"final-{replica.replica}.json"
  path.write_text(json.dumps(result))


# The driver.


def _children(parent):
  """The processes that a process has started, with their command lines."""
  result = {}
  for folder in pathlib.Path("/proc").iterdir():
    if folder.name.isdigit():
      try:
        stat = (folder / "stat").read_text().rpartition(")")[2].split()
        if int(stat[1]) == parent and stat[0] != "Z":
          result[int(folder.name)] = (folder / "cmdline").read_bytes()
      except (OSError, IndexError):
        pass
  return result


def _records(path):
  from optax_dist.coordinator import journal

  return journal.read(path).records if path.exists() else []


def _pids(records):
  """The process of each replica that is a member."""
  pids, members = {}, set()
  for record in records:
    match record["kind"]:
      case "process" if record["ended"] is None:
        pids[record["replica"]] = record["pid"]
      case "join":
        members.add(record["replica"])
      case "lost" | "leave":
        members.discard(record["replica"])
  return {replica: pids[replica] for replica in members if replica in pids}


def _kill(pid):
  try:
    os.kill(pid, signal.SIGKILL)
  except ProcessLookupError:
    return False
  return True


def _strike(launcher, journal, replicas, coordinator, random_):
  """Kills; returns the replicas that were hit."""
  if coordinator:
    for pid, command in _children(launcher.pid).items():
      if _COORDINATOR in command:
        _kill(pid)
  pids = _pids(_records(journal))
  able = sorted(pids)
  chosen = random_.sample(able, min(replicas, max(0, len(able) - 1)))
  return [replica for replica in chosen if _kill(pids[replica])]


def _memory(launcher, journal):
  """MiB of resident memory: of replicas, and of what stands by; medians."""
  replicas = set(_pids(_records(journal)).values())
  result = {"a replica": [], "a standby": []}
  for pid, command in _children(launcher.pid).items():
    path = pathlib.Path(f"/proc/{pid}/statm")
    if b"goodput.py" in command and path.exists():
      pages = int(path.read_text().split()[1])
      mib = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
      result["a replica" if pid in replicas else "a standby"].append(mib)
  return {
    what: statistics.median(all_) for what, all_ in result.items() if all_
  }


def run(args):
  """Launches, strikes, and prints what was found."""
  folder = pathlib.Path(tempfile.mkdtemp(prefix="goodput-"))
  journal = folder / "journal.jsonl"
  command = [
    *(sys.executable, "-m", "optax_dist", "launch"),
    *("--replicas", str(args.replicas), "--min-replicas", "1"),
    *("--restarts", "100000", "--output", str(folder)),
    *args.launch,
    str(pathlib.Path(__file__).resolve()),
    *("--folder", str(folder), "--strategy", args.strategy),
    *("--gradient", str(args.gradient), "--size", str(args.size)),
    *("--replicas", str(args.replicas)),
  ]
  if args.standby:
    command[4:4] = ["--standby", str(args.standby)]
  env = os.environ | {"JAX_PLATFORMS": "cpu"}
  out = (folder / "out.txt").open("wb")
  launcher = subprocess.Popen(command, stdout=out, stderr=out, env=env)
  strikes = []
  try:
    _follow(args, folder, journal, launcher, strikes)
    memory = _memory(launcher, journal)
    (folder / "over").touch()
    code = launcher.wait(60 + 3 * args.gradient)
  finally:
    if launcher.poll() is None:
      launcher.terminate()
      launcher.wait(60)
    out.close()
  _print(args, folder, _records(journal), strikes, code)
  text = ", ".join(f"{what} {mib:.0f} MiB" for what, mib in memory.items())
  print(f"resident memory: {text}")


def _follow(args, folder, journal, launcher, strikes):
  random_ = random.Random(args.seed)
  while len([r for r in _records(journal) if r["kind"] == "commit"]) < 3:
    if launcher.poll() is not None:
      raise SystemExit((folder / "out.txt").read_text()[-3000:])
    time.sleep(0.2)
  began = time.monotonic()
  # Undisturbed steps come first.
  due = began + max(args.every, 3 * args.gradient)
  while time.monotonic() < began + args.seconds:
    if launcher.poll() is not None:
      raise SystemExit((folder / "out.txt").read_text()[-3000:])
    left = began + args.seconds - due
    if time.monotonic() < due or left < min(15.0, args.every):
      time.sleep(0.05)
      continue
    due += args.every
    many, chief = _STRIKES[len(strikes) % len(_STRIKES)]
    now = time.time()
    hit = _strike(launcher, journal, many, chief, random_)
    strikes.append((now, hit, chief))
    print(
      f"{time.monotonic() - began:6.1f} s: killed"
      f" {', '.join([*map(str, hit), *['the coordinator'] * chief])}",
      flush=True,
    )


def _print(args, folder, records, strikes, code):
  from optax_dist.coordinator.metrics import losses

  result = losses.of(records)
  print(" ".join(sys.argv))
  if result is None:
    print("too few undisturbed steps")
  else:
    hit = sum(len(who) for _, who, _ in strikes)
    # All that is missing is missing since the first strike.
    last = max(_times(records))
    under = args.replicas * (last - strikes[0][0]) / result.seconds
    kept, bound = (1 - (1 - x) / under for x in (result.kept, result.bound))
    print(
      f"kept {kept:.1%} from the first strike on, bound {bound:.1%}, {hit} replicas"
      f" and {sum(c for *_, c in strikes)} coordinators killed in {len(strikes)}"
      f" strikes, {(1 - result.kept) * result.seconds / max(1, hit):.1f}"
      " replica-seconds lost a replica's kill"
    )
  _print_stalls(records, strikes)
  _print_back(folder, records, strikes)
  began = next(r["unix_time"] for r in records if r["kind"] == "run")
  written = (folder / "journal.jsonl").stat().st_mtime
  behind = written - began - records[-1]["time"]
  print(f"the journal's clock is {behind:.3f} s behind the host's at the end")
  finals = [json.loads(p.read_text()) for p in sorted(folder.glob("final-*"))]
  equal = len({json.dumps(final) for final in finals}) == 1
  whole = len(finals) == args.replicas
  print(
    f"exit code {code}; {len(finals)} replicas at the end, at step"
    f" {finals[0]['step'] if finals else None}, with"
    f" {'equal' if equal else 'UNEQUAL'} parameters; {folder}"
  )
  if code or not (equal and whole):
    raise SystemExit(1)


def _times(records):
  """When steps were committed, by the clock of `time.time`."""
  began = next(r["unix_time"] for r in records if r["kind"] == "run")
  return [r["time"] + began for r in records if r["kind"] == "commit"]


def _print_stalls(records, strikes):
  """How much longer the steps of strikes were than usual ones."""
  spans = list(itertools.pairwise(_times(records)[1:]))
  if not spans:
    return
  usual = statistics.median(b - a for a, b in spans)
  stalls = {0: [], 1: []}
  for when, _, chief in strikes:
    after = [(a, b) for a, b in spans if b > when][:2]
    if after:
      longest = max(b - a for a, b in after)
      stalls[chief].append(max(0.0, longest - usual))
  for chief, what in ((0, "replicas"), (1, "the coordinator")):
    if stalls[chief]:
      print(
        f"stall of the others after a kill of {what}: median"
        f" {statistics.median(stalls[chief]):.2f} s, longest"
        f" {max(stalls[chief]):.2f} s (a step: {usual:.2f} s)"
      )


def _print_back(folder, records, strikes):
  """How long replicas took to be back, by part."""
  path = folder / "back.jsonl"
  if not path.exists():
    return
  began = next(r["unix_time"] for r in records if r["kind"] == "run")
  joins = [
    (r["replica"], r["time"] + began) for r in records if r["kind"] == "join"
  ]
  starts = [json.loads(line) for line in path.read_text().splitlines()]
  rows = []
  for when, hit, _ in strikes:
    for replica in hit:
      after = [
        s for s in starts if s["replica"] == replica and s["joined"] > when
      ]
      if after:
        first = min(after, key=lambda s: s["joined"])
        names = ("started", "python", "imported", "compiled")
        # What a standby has done before it was needed took no time.
        times = [when, *(max(when, first[n]) for n in names)]
        member = (t for who, t in joins if who == replica and t > when)
        times += [next(member, first["joined"]), first["counted"]]
        rows.append([b - a for a, b in itertools.pairwise(times)])
  if not rows:
    return
  parts = [statistics.median(column) for column in zip(*rows, strict=True)]
  back = [sum(row[:-1]) for row in rows]
  print(
    f"back (as a member) after {statistics.median(back):.2f} s by the median,"
    f" {min(back):.2f} to {max(back):.2f} s; medians: noticed and started"
    f" {parts[0]:.2f}, Python {parts[1]:.2f}, imports {parts[2]:.2f}, first use of"
    f" JAX and compiling {parts[3]:.2f}, joining {parts[4]:.2f}; then until its"
    f" first gradient counted {parts[5]:.2f} s"
  )


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add = parser.add_argument
  add("--replicas", type=int, default=8)
  add("--gradient", type=float, default=1.0, help="seconds, or of a round")
  add("--strategy", choices=_STRATEGIES, default="sync")
  add("--seconds", type=float, default=480.0)
  add("--every", type=float, default=29.0, help="seconds between two strikes")
  add("--standby", type=int, default=0)
  add("--size", type=int, default=1000, help="parameters")
  add("--seed", type=int, default=0)
  add("--launch", nargs="*", default=[], help="more options of launch")
  add("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.folder is None:
    run(args)
  else:
    train(args)


if __name__ == "__main__":
  main()
