"""The picture of timings."""

import matplotlib.image
import pytest

from optax_dist import simulate
from optax_dist.cli import errors
from optax_dist.cli.runs import report_picture
from optax_dist.cli.simulate import timing_picture
from optax_dist.coordinator.metrics import goodput


def _timings():
  latency = simulate.parse_latency("gamma:4,0.25")
  return [
    simulate.simulate_timing(strategy, latency, 4, steps=50)
    for strategy in (simulate.sync_replicas(4), simulate.sync_replicas(3))
  ]


def test_the_colors_are_those_of_a_report(tmp_path):
  colors = report_picture.COLORS
  assert len(set(colors.values())) == len(goodput.CATEGORIES)
  path = tmp_path / "timing.png"
  timing_picture.save(path, _timings(), "a title")
  image = matplotlib.image.imread(path)
  found = {
    tuple((255 * pixel[:3]).round().astype(int))
    for pixel in image[::3, ::3].reshape(-1, 4)
  }
  hexed = {"#{:02x}{:02x}{:02x}".format(*pixel) for pixel in found}
  assert {colors[c] for c in ("useful", "waiting", "dropped")} <= hexed
  assert colors["recovery"] not in hexed


def test_a_file_that_cannot_be_written_is_an_error(tmp_path):
  with pytest.raises(errors.CommandError, match="can't write"):
    timing_picture.save(tmp_path / "no" / "x.png", _timings(), "")
