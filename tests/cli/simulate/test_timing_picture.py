"""The picture of timings."""

import matplotlib.image
import pytest

from optax_dist import simulate
from optax_dist.cli import errors
from optax_dist.cli.simulate import timing_picture


def _timings():
  latency = simulate.parse_latency("gamma:4,0.25")
  return [
    simulate.simulate_timing(strategy, latency, 4, steps=50)
    for strategy in (simulate.sync_replicas(4), simulate.sync_replicas(3))
  ]


def test_a_color_for_each_cause(tmp_path):
  assert len(set(timing_picture.COLORS.values())) == len(timing_picture.COLORS)
  path = tmp_path / "timing.png"
  timing_picture.save(path, _timings(), "a title")
  image = matplotlib.image.imread(path)
  found = {
    tuple((255 * pixel[:3]).round().astype(int))
    for pixel in image[::3, ::3].reshape(-1, 4)
  }
  hexed = {"#{:02x}{:02x}{:02x}".format(*pixel) for pixel in found}
  shown = {timing_picture.COLORS[c] for c in ("useful", "waiting", "stale")}
  assert shown <= hexed
  assert timing_picture.COLORS["down"] not in hexed


def test_a_file_that_cannot_be_written_is_an_error(tmp_path):
  with pytest.raises(errors.CommandError, match="can't write"):
    timing_picture.save(tmp_path / "no" / "x.png", _timings(), "")
