"""Kills each process of replicas with several, in each phase, and takes the time.

Two replicas of two processes (gloo inside, all on loopback); one process after
the other is killed, its replica starts again as a whole, and the run goes on.
Ends with exit code 1 if anything hangs, or if states differ.

python benchmarks/coordinator/groups.py [--phases gather,applied] [--seconds 90]
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import statistics
import sys
import tempfile
import time

_ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(_ROOT), str(_ROOT / "tests" / "coordinator")]

import group_runs  # noqa: E402

# And which time in it: a replica that is back takes some steps before.
PHASES = {
  "joining": 1,
  "fetching_snapshot": 1,
  "computing": 3,
  "arrived": 3,
  "reduce_scatter": 3,
  "gather": 3,
  "done": 3,
  "applied": 3,
}
PARTS = ("python", "jax", "compile", "join", "step")


def cases(phases: list[str]) -> list[tuple[int, str]]:
  """Process and phase; process 0 alone asks to join."""
  return [
    (rank, phase)
    for phase in phases
    for rank in (0, 1)
    if (rank, phase) != (1, "joining")
  ]


def strike(
  victim: int, phases: list[str], seconds: float
) -> list[dict[str, object]]:
  """Kills the processes of one of the replicas, one after the other."""
  found: list[dict[str, object]] = []
  other = 1 - victim
  with (
    tempfile.TemporaryDirectory() as folder,
    group_runs.Groups(pathlib.Path(folder), target=10**9) as groups,
  ):
    todo = cases(phases)
    groups.restarts = False
    groups.start(0)
    groups.start(1)
    members = lambda group, who: [
      e for e in group[0].said("step") if e["members"] == who
    ]
    both = lambda: all(members(groups.live[r], [0, 1]) for r in (0, 1))
    groups.wait(both, "the replicas do not begin", seconds)
    for rank, phase in todo:
      fault = {"phase": phase, "time": PHASES[phase]}
      groups.kill(victim)
      group = groups.start(victim, {rank: fault})
      one = group[rank]
      groups.wait(
        lambda one=one: one.said("struck") and one.ended_at,
        f"{one} does not come to {phase}",
        seconds,
      )
      killed = one.said("struck")[0]["at"]
      alone = lambda killed=killed: [
        e for e in members(groups.live[other], [other]) if e["at"] > killed
      ]
      groups.wait(alone, f"nobody goes on after {one} in {phase}", seconds)
      started = time.time()
      again = groups.start(victim)
      back = lambda again=again: members(again, [0, 1])
      groups.wait(back, f"the replica of {one} does not come back", seconds)
      times = again[0].said("begun")[0]["times"]
      marks = [
        started,
        *(times["at"] + times[n] for n in ("imported", "met", "compiled")),
        times["at"] + times["joined"],
        back()[0]["at"],
      ]
      parts = [b - a for a, b in itertools.pairwise(marks)]
      found.append(
        {
          "process": f"{victim}.{rank}",
          "phase": phase,
          "next": alone()[0]["at"] - killed,
          "back": marks[-1] - started,
          **dict(zip(PARTS, parts, strict=True)),
        }
      )
      print(
        f"{victim}.{rank} in {phase:18}"
        f" next commit {1e3 * found[-1]['next']:7.0f} ms, back after"  # type: ignore[operator]
        f" {found[-1]['back']:5.1f} s: "
        + ", ".join(f"{n} {found[-1][n]:.1f}" for n in PARTS),
        flush=True,
      )
    groups.finish()
    ended = groups.run(seconds)
    print(f"{group_runs.check_equal(ended)} fingerprints are equal", flush=True)
  return found


def main() -> int:
  """The exit status: 1 if something hangs, or states differ."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--phases", default=",".join(PHASES))
  parser.add_argument("--victims", default="0,1")
  parser.add_argument("--seconds", type=float, default=120.0)
  args = parser.parse_args()
  found = []
  for victim in map(int, args.victims.split(",")):
    try:
      found += strike(victim, args.phases.split(","), args.seconds)
    except AssertionError as error:
      print(error)
      return 1
  for name in ("next", "back", *PARTS):
    values = [row[name] for row in found]
    print(
      f"{name:8} median {statistics.median(values):.3f} s, most {max(values):.3f} s"
    )  # type: ignore[type-var]
  print(f"{len(found)} kills, 0 hangs, states equal")
  return 0


if __name__ == "__main__":
  raise SystemExit(main())
