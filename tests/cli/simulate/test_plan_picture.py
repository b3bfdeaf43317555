"""The picture of a plan."""

import matplotlib.axes
import pytest

from optax_dist import simulate
from optax_dist.cli import errors
from optax_dist.cli.simulate import plan_picture


def _plan():
  return simulate.plan(
    simulate.parse_latency("bernoulli:1,10,0.1"), 5, steps=10, repetitions=20
  )


def test_the_recommended_number_is_marked(tmp_path, monkeypatch):
  marks, plan = [], _plan()
  annotate = matplotlib.axes.Axes.annotate
  monkeypatch.setattr(
    matplotlib.axes.Axes,
    "annotate",
    lambda axes, text, at, **options: (
      marks.append((text, at)) or annotate(axes, text, at, **options)
    ),
  )
  plan_picture.save(tmp_path / "plan.png", plan, "a title")
  best = plan.recommended
  k = best.replicas_to_aggregate
  assert marks == [(f"{k} of 5", (k, best.progress))]
  assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_that_cannot_be_written_is_an_error(tmp_path):
  with pytest.raises(errors.CommandError, match="can't write"):
    plan_picture.save(tmp_path / "no" / "x.png", _plan(), "")
