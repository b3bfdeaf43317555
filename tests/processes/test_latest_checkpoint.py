"""All processes of a replica go on from the same checkpoint, or from none."""

import pathlib

import jax
import launch

from optax_dist import coordinator
from optax_dist.coordinator import checkpoint, checkpoint_folder


def _latest(folders):
  coordinator.initialize_processes(jax.process_count())
  result = []
  for folder in folders:
    own = pathlib.Path(folder, str(jax.process_index()))
    latest = checkpoint.latest(own)
    result.append(latest and latest.relative_to(own))
  return result


def test_first_process_decides_which_checkpoint_is_latest(tmp_path):
  # What each process sees: another replica saves one in between.
  cases = [([], ["step-2"]), (["step-2"], ["step-2", "step-12"])]
  for case, seen in enumerate(cases):
    for process, names in enumerate(seen):
      for name in names:
        own = tmp_path / str(case) / str(process)
        about = checkpoint_folder.About("a run", int(name.split("-")[1]))
        with checkpoint_folder.new(own / name, about) as path:
          path.mkdir()
  folders = [str(tmp_path / str(case)) for case in range(len(cases))]
  expected = [None, pathlib.Path("step-2")]
  assert launch.run(_latest, folders, processes=2) == [expected] * 2
