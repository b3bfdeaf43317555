"""The picture of a run."""

import matplotlib.figure
import matplotlib.image
import pytest

from optax_dist.cli import errors
from optax_dist.cli.train import picture


def _records(epochs, steps_per_epoch):
  records = []
  for step in range(1, epochs * steps_per_epoch + 1):
    records.append({"step": step, "epoch": (step - 1) // steps_per_epoch + 1})
    records[-1]["loss"] = 1 / step
    if step % steps_per_epoch == 0:
      records[-1]["test_accuracy"] = 1 - 1 / step
  return records


def _size(path):
  height, width, _ = matplotlib.image.imread(path).shape
  return height, width


@pytest.mark.parametrize(("epochs", "steps"), [(1, 1), (3, 4)])
def test_further_panels_stand_to_the_right(tmp_path, epochs, steps):
  records = _records(epochs, steps)
  drawn = []

  def panel(axes, given):
    drawn.append(list(given))
    axes.plot(picture.epochs_passed(given), [r["loss"] for r in given])

  picture.save(tmp_path / "two.png", records, "two")
  picture.save(tmp_path / "three.png", records, "three", [panel])
  (height, width), wider = map(
    _size, (tmp_path / "two.png", tmp_path / "three.png")
  )
  assert wider == (height, pytest.approx(1.5 * width, abs=1))
  assert drawn == [records]


def test_axes_are_labelled_with_units_and_show_the_metrics():
  records = _records(3, 4)
  loss, accuracy = matplotlib.figure.Figure().subplots(1, 2)
  picture._draw_loss(loss, records)
  picture._draw_accuracy(accuracy, records)
  assert loss.get_ylabel().endswith("(nats)")
  assert accuracy.get_ylabel().endswith("(%)")
  assert "epoch" in loss.get_xlabel()
  assert "epoch" in accuracy.get_xlabel()
  each_step, mean = loss.get_lines()
  assert list(each_step.get_ydata()) == [r["loss"] for r in records]
  assert list(each_step.get_xdata())[-1] == 3
  assert mean.get_ydata()[0] == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4)
  (line,) = accuracy.get_lines()
  assert list(line.get_xdata()) == [1, 2, 3]
  assert line.get_ydata() == pytest.approx([75, 87.5, 100 * 11 / 12])


def test_a_file_that_can_not_be_written_is_a_command_error(tmp_path):
  (tmp_path / "taken.png").mkdir()
  with pytest.raises(errors.CommandError, match="Is a directory"):
    picture.save(tmp_path / "taken.png", _records(1, 1), "no file")


def test_a_resumed_run_may_lack_its_first_steps():
  records = _records(4, 5)
  assert picture.epochs_passed(records)[-1] == 4.0
  # Two steps were not written yet; of another run, half of what there was.
  for cut in (records[:3] + records[5:], records[7:]):
    passed = picture.epochs_passed(cut)
    assert passed[-1] == 4.0
    assert passed[-2] == 3.8


def test_without_an_evaluation_there_is_no_accuracy(tmp_path):
  records = _records(1, 4)
  for record in records:
    record.pop("test_accuracy", None)
  picture.save(tmp_path / "curves.png", records, "none")
  assert (tmp_path / "curves.png").stat().st_size
