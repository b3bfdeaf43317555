"""A bar on a terminal, and nothing off it."""

import io

import rich.console

from optax_dist.cli import bar


def _shown(terminal):
  text = io.StringIO()
  console = rich.console.Console(
    file=text, force_terminal=terminal, width=60, color_system=None
  )
  with bar.bar("counting", 4, console) as done:
    done(1)
    done(3)
  return text.getvalue()


def test_a_bar_on_a_terminal():
  assert "counting" in _shown(terminal=True)
  assert "75%" in _shown(terminal=True)


def test_nothing_off_a_terminal():
  assert _shown(terminal=False).strip() == ""
