"""Replicas come and go, and nothing changes: real processes.

python -m tests.churn --seeds 0:300

Each run trains a small model (digits, or a transformer with dropout) with
deterministic data, while replicas are killed in a phase of a step, stopped, join
and leave, the coordinator is killed, also with the end of its log as when its host
loses power, or lost for good, or all replicas are killed at once; after these two
the job goes on from its last checkpoint, with another number of replicas from 1 to
5. With --width 2048 it is always the transformer, with 34 million
parameters. Checked is that all replicas had, after each step, the parameters and
optimizer state of an undisturbed run of one replica, bit for bit; that each sample
was in exactly one slot of each committed step; and that no process is left. The
exit code is 1 if anything was wrong.

With JAX_PLATFORMS=cuda,cpu in the environment all of them compute on one GPU.
"""

from __future__ import annotations

import collections
import pathlib
import sys

# Where helpers of the tests lie, as pytest has it.
sys.path.extend(
  str(pathlib.Path(__file__).parents[1] / "helpers" / name)
  for name in ("networks", "processes")
)

from tests.churn import plans
from tests.churn import run as runs
from tests.runs import command


def main(argv: list[str] | None = None) -> int:
  """Runs the seeds, prints a line for each, and returns the exit code."""
  options = command.parser("tests.churn", __doc__)
  options.add_argument("--width", type=int, help="of the transformer")
  args = options.parse_args(argv)
  chosen = [plans.plan(s, args.width) for s in args.seeds or range(50)]
  with command.folder(args.output) as folder:
    references = runs.References(folder)
    results: list[runs.Result] = command.run_all(
      chosen,
      lambda plan: runs.run(folder, plan, references(plan.setting)),
      lambda result: f"{result.compared} digests",
    )
  happened = collections.Counter(k for r in results for k in r.happened)
  good = sum(not result.problems for result in results)
  print(
    f"{good} of {len(results)} runs were good, in"
    f" {sum(r.seconds for r in results):.0f} s:"
    f" {sum(r.compared for r in results):,} digests compared, "
    + ", ".join(f"{n} {kind}" for kind, n in sorted(happened.items()))
  )
  return int(good < len(chosen))


if __name__ == "__main__":
  raise SystemExit(main())
