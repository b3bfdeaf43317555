"""The picture of a report."""

import matplotlib.figure
import pytest

from optax_dist import simulate
from optax_dist.cli import errors
from optax_dist.cli.runs import report_picture
from optax_dist.coordinator import journal
from optax_dist.coordinator.metrics import time_ledger


@pytest.fixture(name="ledger")
def _ledger(tmp_path):
  path = tmp_path / "run.jsonl"
  with journal.Journal(path) as file:
    simulate.simulate_timing(
      simulate.sync_replicas(3),
      simulate.parse_latency("exponential:1"),
      4,
      steps=100,
      journal=file,
    )
  return time_ledger.of(journal.read(path).records)


def test_the_categories_of_all_replicas_are_stacked(ledger):
  axes = matplotlib.figure.Figure().subplots()
  report_picture.draw(axes, "runs/$a$.jsonl", ledger)
  total = ledger.goodput()
  assert axes.get_title() == f"runs/$a$.jsonl: {total.goodput:.1%} useful"
  shown = [c for c in report_picture.COLORS if total.seconds[c] > 0]
  found = [text.get_text() for text in axes.get_legend().get_texts()]
  # From top to bottom, as in the picture.
  assert found == [f"{c}, {total.share(c):.1%}" for c in shown[::-1]]
  top = axes.collections[-1].get_datalim(axes.transData)
  assert top.y1 == pytest.approx(4.0)
  assert axes.get_ylim() == (0.0, 4.0)


def test_a_file_that_cannot_be_written_is_an_error(ledger, tmp_path):
  with pytest.raises(errors.CommandError, match="can't write"):
    report_picture.save(tmp_path / "no" / "x.png", [("a", ledger)])
