"""Panels side by side."""

import matplotlib.image
import pytest

from optax_dist.cli import errors, panels


def test_each_panel_is_drawn_once_and_as_large_as_asked_for(tmp_path):
  drawn = []
  path = tmp_path / "x.png"
  panels.save(path, "two", [drawn.append, drawn.append], size=(3, 2), dpi=50)
  assert len(set(drawn)) == 2
  assert matplotlib.image.imread(path).shape[:2] == (100, 300)


def test_the_first_panels_have_their_first_bar_on_top(tmp_path):
  drawn = []
  three = [drawn.append] * 3
  panels.save(tmp_path / "x.png", "three", three, inverted=2)
  assert [axes.yaxis_inverted() for axes in drawn] == [True, True, False]


def test_a_file_that_cannot_be_written_is_an_error(tmp_path):
  with pytest.raises(errors.CommandError, match="can't write"):
    panels.save(tmp_path / "no" / "x.png", "none", [lambda axes: None])


@pytest.mark.parametrize(
  ("name", "start"),
  [
    ("x.png", b"\x89PNG"),
    ("x.JPG", b"\xff\xd8"),
    ("x.svg", b"<?xml"),
    ("x.pdf", b"%PDF"),
    ("x", b"\x89PNG"),
  ],
)
def test_the_name_of_a_picture_says_its_format(name, start, tmp_path):
  panels.save(tmp_path / name, "one", [lambda axes: None], size=(2, 2), dpi=40)
  assert (tmp_path / name).read_bytes().startswith(start)


def test_a_format_that_is_not_known_is_refused(tmp_path):
  with pytest.raises(errors.CommandError, match=r"x\.gif: .*\.jpg"):
    panels.save(tmp_path / "x.gif", "one", [lambda axes: None])
