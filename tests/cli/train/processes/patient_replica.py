"""A replica of `optax-dist train` that waits until all have joined.

Otherwise a run of a second could be over before the last process has started. And
no replica that is only slow is lost.
"""

import os
import pathlib

import waiting

from optax_dist import coordinator
from optax_dist.cli.train.processes import replica

_join = coordinator.join


def _join_with_all(*args, **options):
  slow = {"attempt_timeout": 60.0, "leader_timeout": 60.0}
  joined = _join(*args, **options | slow)
  folder = pathlib.Path(os.environ["PATIENT_FOLDER"])
  (folder / str(joined.replica)).touch()
  # Those of an earlier process of a replica stay.
  wanted = int(os.environ["PATIENT_REPLICAS"])
  waiting.until(lambda: len(os.listdir(folder)) == wanted, seconds=300.0)
  return joined


if __name__ == "__main__":
  coordinator.join = _join_with_all
  raise SystemExit(replica.main())
