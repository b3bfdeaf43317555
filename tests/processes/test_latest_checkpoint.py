"""All processes of a replica go on from the same checkpoint, or from none."""

import pathlib

import jax
import launch
import pytest

from optax_dist.coordinator import checkpoint


def _latest(folder):
  own = pathlib.Path(folder, str(jax.process_index()))
  found = checkpoint.latest(own)
  return found and found.relative_to(own)


# What each process sees: another replica saves one in between.
@pytest.mark.parametrize(
  ("first", "second"), [([], ["step-2"]), (["step-2"], ["step-2", "step-12"])]
)
def test_the_first_process_decides(tmp_path, first, second):
  for i, names in enumerate((first, second)):
    for name in names:
      (tmp_path / str(i) / name).mkdir(parents=True)
  expected = pathlib.Path(first[0]) if first else None
  assert launch.run(_latest, str(tmp_path), processes=2) == [expected] * 2
