"""Tries mutants of a pure room's files, and names those that nothing finds.

python -m tests.mutants optax_dist/quorum/rules.py
python -m tests.mutants optax_dist/quorum/*.py optax_dist/ledger/*.py
python -m tests.mutants optax_dist/coordinator/protocol/client/*.py --sample 20
"""

from __future__ import annotations

import argparse
import math
import pathlib
import random
import sys
import time

from tests.mutants import making, running

_ROOT = pathlib.Path("optax_dist")
# Mutants that change no behaviour, with the reason.
_EQUIVALENT = pathlib.Path(__file__).with_name("equivalent.txt")
# Seconds of a test that `--quick` runs.
_QUICK = 1.0
# Simulated schedules of each kind, after a room's own tests: the first ones, and those
# in which deadlines are checked.
_CHOSEN = (*range(120), *range(7, 32 * 8, 32))
_SCHEDULES: dict[str, dict[str, tuple[int, ...]]] = {
  "quorum": {"faults": _CHOSEN},
  "ledger": {"leases": (*range(60),)},
  "coordinator": {
    "faults": _CHOSEN,
    "leases": (*range(40),),
    "slots": (*range(20),),
    "fragments": (*range(20),),
  },
}


def equivalent() -> dict[str, str]:
  """The known mutants without another behaviour, and why."""
  result, reason = {}, ""
  for line in _EQUIVALENT.read_text().splitlines():
    if line.startswith("#"):
      reason = line[1:].strip()
    elif line.strip():
      result[line.strip()] = reason
  return result


def tests_of(path: pathlib.Path) -> list[str]:
  """The room's own tests."""
  below = path.relative_to(_ROOT)
  tests = pathlib.Path("tests") / below.parent
  own = tests / f"test_{below.name}"
  if below.parts[0] == "quorum":
    return [str(tests)]
  if below.parts[0] == "ledger":
    # Not those that call jax, which may wait forever in a forked process.
    rules = tests / "test_not_finite.py"
    return sorted({str(one) for one in (own, rules) if one.exists()})
  while not tests.exists():
    tests = tests.parent  # A folder whose parts are tested together.
  return [str(own)] if own.exists() else [str(tests)]


def main(argv: list[str] | None = None) -> int:
  """Tries the mutants of each file."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("paths", nargs="+", type=pathlib.Path)
  parser.add_argument("--sample", type=int, help="so many of all, at random")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument(
    "--of", nargs="+", default=[""], help="only mutants whose name has one"
  )
  parser.add_argument("--survivors", action="store_true", help="only these")
  parser.add_argument(
    "--quick", action="store_true", help="no schedules, no long tests"
  )
  args = parser.parse_args(argv)
  if args.sample is not None and args.sample < 1:
    parser.error(f"--sample must be at least 1, got {args.sample}")
  known = equivalent()
  some = [
    (path, mutant)
    for path in args.paths
    for mutant in making.mutants(path.read_text())
    if any(part in mutant.name for part in args.of)
  ]
  if not some:
    parser.error(
      f"none of the files has a mutant with any of {args.of} in its name"
    )
  if args.sample is not None and args.sample < len(some):
    some = random.Random(args.seed).sample(some, args.sample)
  survived = 0
  for path in args.paths:
    chosen = [mutant for other, mutant in some if other == path]
    names = {mutant: f"{path}: {mutant.name}" for mutant in chosen}
    todo = [mutant for mutant in chosen if names[mutant] not in known]
    if not chosen:
      continue
    began = time.perf_counter()

    def say(mutant: making.Mutant, by: str, names=names) -> None:
      if not by or not args.survivors:
        print(f"{names[mutant]}  [{by or 'SURVIVES'}]", flush=True)

    seeds = _SCHEDULES[path.relative_to(_ROOT).parts[0]]
    schedules = None if args.quick else running.schedules(seeds)
    longest = _QUICK if args.quick else math.inf
    results = running.run(path, tests_of(path), todo, schedules, say, longest)
    lost = sum(not by for _, by in results)
    print(
      f"{path}: {len(chosen)} mutants, {len(chosen) - len(todo)} equivalent, "
      f"{len(results) - lost} found, {lost} survived, "
      f"{time.perf_counter() - began:.0f} s",
      flush=True,
    )
    survived += lost
  return int(bool(survived))


if __name__ == "__main__":
  sys.exit(main())
