"""Runs in which one host is cut off, again and again, for longer than deadlines."""

from __future__ import annotations

import time

import cuts
import hosts

from tests.chaos.cases import REPLICAS, Case
from tests.chaos.pool import Pool
from tests.chaos.run import Result


def run(pool: Pool, case: Case) -> Result:
  """Runs one case with replicas on hosts of their own, and checks it.

  Args:
    pool: only its folder is used: processes on hosts are started for each run.
    case: one whose fault is "cut-host".
  """
  result = Result(case)
  if reason := hosts.not_permitted():
    result.problems.append(f"not struck: hosts can't be made: {reason}")
    return result
  folder = pool.folder / f"hosts-{case.seed}"
  folder.mkdir(exist_ok=True)
  start = time.monotonic()
  try:
    with cuts.Run(
      folder,
      REPLICAS,
      method="fork",
      replicas_to_aggregate=case.aggregate,
      max_staleness=case.max_staleness,
      # The deadlines that a cut is to exceed are the usual ones.
      transfer_timeout=None,
      silence_timeout=None,
    ) as between:
      result.struck = True
      between.cut_repeatedly(case.times, case.seconds, case.healed)
      result.steps, problems = between.finish()
      result.problems += problems
  except AssertionError as error:
    early = str(error).startswith("ended early")
    result.problems.append(str(error) if early else f"hang: {error}")
  result.seconds = time.monotonic() - start
  return result
