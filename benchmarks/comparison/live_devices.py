"""Compares JAX's `live_devices` with the coordinator, fault by fault.

python benchmarks/comparison/live_devices.py
python benchmarks/comparison/live_devices.py --only stopped,rejoin --columns jax,k-of-n

Three processes on this host take steps together, and one fault strikes. Prints a
table of what the others did: how long no step was taken, who ended, and whether a
process that came back takes part again. A cell ends after `--seconds` and kills all
that is left, so nothing can hang. Everything is on loopback; a host is cut off in
network namespaces, which need root. The exit code is 1 if the coordinator did not
do in a cell what docs/coming_from_live_devices.md says.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

_ROOT = pathlib.Path(__file__).parents[2]
_PEER = pathlib.Path(__file__).with_name("live_devices_peer.py")
sys.path[:0] = [str(_ROOT), str(_ROOT / "tests" / "helpers" / "networks")]

import hosts as host_maker  # noqa: E402

from optax_dist.coordinator.server import process  # noqa: E402
from optax_dist.coordinator.transport import addresses  # noqa: E402

COUNT = 3
# All time-outs, in seconds, but for those of JAX in its first column.
TIMEOUT = 5
_CUT = 15.0
_READY = 120.0

COLUMNS = {
  "jax-default": "`live_devices`, default time-outs",
  "jax": f"`live_devices`, {TIMEOUT} s",
  "n-of-n": "coordinator, 3 of 3",
  "k-of-n": "coordinator, 2 of 3",
}
ROWS = {
  "kill": "a member is killed",
  "rejoin": "a member is killed, and started again after 10 s",
  "head": "process 0 is killed",
  "coordinator": "the coordinator is killed",
  "stuck": "a member's loop is stuck, its process lives",
  "stopped": "a member is stopped (SIGSTOP)",
  "sigterm": "a member gets SIGTERM",
  "cut": f"a member's host is cut off for {_CUT:.0f} s",
}


class Peer:
  """One process of a cell, and what it has printed."""

  def __init__(
    self, settings: dict[str, Any], folder: pathlib.Path, start: Any
  ):
    self.index = settings["index"]
    self._out = folder / f"{self.index}-{time.monotonic_ns()}.jsonl"
    environment = os.environ | {
      "JAX_PLATFORMS": "cpu",
      "JAX_NUM_CPU_DEVICES": "1",
      "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
      "PYTHONPATH": str(_ROOT),
      "TMPDIR": str(folder),
    }
    if settings["kind"] == "jax" and settings["seconds"]:
      flag = f"--xla_cpu_collective_timeout_seconds={settings['seconds']}"
      environment["XLA_FLAGS"] = flag
    with self._out.open("wb") as out, open(f"{self._out}.err", "wb") as err:
      self.process = start(
        [sys.executable, str(_PEER), json.dumps(settings)],
        cwd=_ROOT,
        env=environment,
        stdout=out,
        stderr=err,
        start_new_session=True,
      )

  def records(self) -> list[dict[str, Any]]:
    lines = self._out.read_bytes().split(b"\n")[:-1]
    # Gloo prints lines of its own.
    return [json.loads(line) for line in lines if line.startswith(b"{")]

  def pid(self) -> int:
    """Of the process itself, which a network namespace's command started."""
    return next(r["pid"] for r in self.records() if r["event"] == "start")

  def steps(self, members: int = 0, after: float = 0.0) -> list[float]:
    """When it took steps of at least so many members."""
    return [
      r["at"]
      for r in self.records()
      if r["event"] == "step" and r["members"] >= members and r["at"] > after
    ]


@dataclasses.dataclass
class Cell:
  """One fault in one column: its processes and what starts them."""

  kind: str
  quorum: int
  seconds: int
  folder: pathlib.Path
  address: str
  host: Callable[[int], str]
  start: Callable[[int], Any]
  coordinator: Any = None
  secret: str = dataclasses.field(default_factory=secrets.token_hex)
  peers: list[Peer] = dataclasses.field(default_factory=list)

  def begin(self, index: int) -> Peer:
    settings = {
      "kind": self.kind,
      "index": index,
      "count": COUNT,
      "quorum": self.quorum,
      "seconds": self.seconds,
      "address": self.address,
      "host": self.host(index),
      "secret": self.secret,
    }
    self.peers.append(Peer(settings, self.folder, self.start(index)))
    return self.peers[-1]

  def close(self) -> None:
    for peer in self.peers:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(peer.process.pid, signal.SIGCONT)
        os.killpg(peer.process.pid, signal.SIGKILL)
      peer.process.wait()


@contextlib.contextmanager
def made(column: str, row: str) -> Iterator[tuple[Cell, Any]]:
  """The processes of a cell; and its hosts, where there are several."""
  kind = "jax" if column.startswith("jax") else "ours"
  quorum = 2 if column == "k-of-n" else 3
  seconds = 0 if column == "jax-default" else TIMEOUT
  with contextlib.ExitStack() as stack:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    rest = {
      "kind": kind,
      "quorum": quorum,
      "seconds": seconds,
      "folder": pathlib.Path(folder),
    }
    if row == "cut":
      hosts = stack.enter_context(host_maker.Hosts(COUNT))
      cell = Cell(
        **rest,
        address=f"{hosts.address(0)}:29300",
        host=hosts.address,
        start=lambda i: lambda command, **o: hosts.start(i, command, **o),
      )
    else:
      hosts, server = None, None
      secret = secrets.token_hex()
      if kind == "ours":
        # A replica that starts it again finds its log there.
        server = stack.enter_context(
          process.start(secret.encode(), port=0, env={"TMPDIR": folder})
        )
        address = server.address
      else:
        address = f"127.0.0.1:{addresses.free_ports()[0]}"
      cell = Cell(
        **rest,
        address=address,
        host=lambda i: "127.0.0.1",
        start=lambda i: subprocess.Popen,
        coordinator=server,
        secret=secret,
      )
    stack.callback(cell.close)
    yield cell, hosts


def _wait(ready: Callable[[], bool], seconds: float) -> bool:
  end = time.monotonic() + seconds
  while not ready():
    if time.monotonic() > end:
      return False
    time.sleep(0.05)
  return True


def strike(cell: Cell, hosts: Any, row: str) -> list[Peer]:
  """Injects the fault; returns the processes that it does not hit."""
  victim = cell.peers[0 if row == "head" else -1]
  if row == "coordinator":
    if cell.kind == "jax":
      raise LookupError("it is in process 0")
    cell.coordinator.kill()
    return cell.peers
  if row == "cut":
    hosts.vanish(victim.index)
  else:
    sent = {
      "stuck": signal.SIGUSR1,
      "stopped": signal.SIGSTOP,
      "sigterm": signal.SIGTERM,
    }.get(row, signal.SIGKILL)
    os.kill(victim.pid(), sent)
  return [peer for peer in cell.peers if peer is not victim]


def run(column: str, row: str, seconds: float) -> dict[str, Any]:
  """Runs a cell; returns what was seen."""
  with made(column, row) as (cell, hosts):
    for index in range(COUNT):
      cell.begin(index)
    together = lambda: all(len(p.steps(members=2)) > 20 for p in cell.peers)
    if not _wait(together, _READY):
      errors = [pathlib.Path(f"{p._out}.err").read_text() for p in cell.peers]
      raise RuntimeError("\n".join(errors))
    struck = time.monotonic()
    try:
      others = strike(cell, hosts, row)
    except LookupError as error:
      return {"note": str(error)}
    victim = next((p for p in cell.peers if p not in others), None)
    back, returned = None, None
    if row == "rejoin":
      time.sleep(10.0)
      returned = time.monotonic()
      victim = cell.begin(victim.index)
    if row == "cut":
      time.sleep(_CUT)
      hosts.heal()
      returned = time.monotonic()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
      ended = [p for p in others if p.process.poll() is not None]
      if returned is not None and back is None:
        together = [p.steps(COUNT, returned) for p in (*others, victim)]
        if column == "k-of-n":  # A step takes two; it is in some.
          together = [victim.steps(0, returned)]
        if all(together):
          back = max(t[0] for t in together) - returned
      if len(ended) == len(others):
        break
      time.sleep(0.1)
    now = time.monotonic()
    result: dict[str, Any] = {
      "ended": [p.process.poll() for p in others],
      "victim": victim.process.poll() if victim else None,
      "back": back,
      "watched": now - struck,
    }
    # A pause is one in which none of the others takes a step.
    after = sorted(t for p in others for t in p.steps(after=struck))
    edges = [struck, *after, now]
    gaps = [b - a for a, b in itertools.pairwise(edges)]
    # What was in flight may still be taken.
    result["steps"] = sum(t > struck + 1.0 for t in after)
    result["stall"] = max(gaps[:-1], default=None)
    result["silent"] = gaps[-1]
    errors = [
      r["error"]
      for p in (*others, *([victim] if victim else []))
      for r in p.records()
      if r["event"] == "error" and r["at"] > struck
    ]
    # One of each kind, whatever its numbers are.
    kinds = {re.sub(r"\d+", "#", error): error for error in errors}
    result["errors"] = list(kinds.values())
    return result


def _how(code: int) -> str:
  return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def words(result: dict[str, Any], row: str) -> str:
  """What was seen, as a cell of the table."""
  if "note" in result:
    return result["note"]
  codes = [code for code in result["ended"] if code is not None]
  parts = []
  if codes and len(codes) == len(result["ended"]):
    ends = sorted({_how(code) for code in codes})
    parts.append(f"all end ({', '.join(ends)})")
    parts.append(f"after {result['watched']:.0f} s")
  elif not result["steps"] or result["silent"] > 5.0:
    parts.append(f"no step in {result['silent']:.0f} s")
  else:
    parts.append(f"steps go on, after {result['stall']:.2g} s")
  if row in ("rejoin", "cut") and not codes:
    back = result["back"]
    parts.append(
      "does not come back" if back is None else f"back after {back:.2g} s"
    )
  if row == "sigterm":
    code = result["victim"]
    parts.append("it goes on" if code is None else f"it ends ({_how(code)})")
  return ", ".join(parts)


def promised(result: dict[str, Any], row: str) -> bool:
  """Whether the coordinator did what the page says."""
  goes_on = result["steps"] > 0 and result["silent"] < 5.0
  stalls = result["stall"] is not None and result["stall"] < 3 * TIMEOUT
  comes_back = result["back"] is not None or row not in ("rejoin", "cut")
  return goes_on and stalls and comes_back


def _names(known: dict[str, str]) -> Callable[[str], list[str]]:
  def parse(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= known.keys():
      raise argparse.ArgumentTypeError(
        f"must be some of {','.join(known)}, got {text!r}"
      )
    return names

  return parse


def main(argv: list[str] | None = None) -> int:
  """Runs the cells, prints a table, and returns the exit code."""
  parser = argparse.ArgumentParser(
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("--only", type=_names(ROWS), default=list(ROWS))
  parser.add_argument("--columns", type=_names(COLUMNS), default=list(COLUMNS))
  parser.add_argument(
    "--seconds", type=float, default=30.0, help="how long a cell is watched"
  )
  args = parser.parse_args(argv)
  wrong = 0
  print(f"| | {' | '.join(COLUMNS[c] for c in args.columns)} |", flush=True)
  print("|---" * (len(args.columns) + 1) + "|")
  for row in args.only:
    cells = []
    for column in args.columns:
      if row == "cut" and host_maker.not_permitted():
        cells.append(host_maker.not_permitted())
        continue
      result = run(column, row, args.seconds)
      cells.append(words(result, row))
      for error in result.get("errors", ()):
        print(f"{column}, {row}: {error}", file=sys.stderr)
      if column in ("n-of-n", "k-of-n") and not promised(result, row):
        wrong += 1
        print(f"{column}, {row}: {result}", file=sys.stderr)
    print(f"| {ROWS[row]} | {' | '.join(cells)} |", flush=True)
  return 1 if wrong else 0


if __name__ == "__main__":
  sys.exit(main())
