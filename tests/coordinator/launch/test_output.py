"""Tests that replicas' output is complete, labelled, and kept."""

import contextlib
import errno
import os
import sys

import full_disk
import pytest

from optax_dist.coordinator.launch import output


@pytest.fixture
def lines():
  return []


def _printed(lines, **options):
  return output.OutputRelay(
    "replica 2", echo=lambda *x: lines.append(x), **options
  )


def test_lines_are_printed_whole(lines):
  printed = _printed(lines)
  printed.take(b"one\ntw", error=False)
  printed.take(b"an error\n", error=True)
  printed.take("o \N{SNOWMAN}".encode()[:4], error=False)
  assert lines == [("replica 2", "one", False), ("replica 2", "an error", True)]
  printed.take("\N{SNOWMAN}".encode()[2:] + b"\nlast", error=False)
  printed.end()
  assert [text for _, text, _ in lines[2:]] == ["two \N{SNOWMAN}", "last"]
  assert printed.tail().endswith("two \N{SNOWMAN}\nlast")


def test_last_state_of_a_progress_bar_is_printed(lines):
  printed = _printed(lines)
  printed.take(b"\r10%\r20%\r100%\r\n", error=True)
  assert lines == [("replica 2", "100%", True)]


def test_a_line_without_an_end_is_cut(lines):
  printed = _printed(lines)
  printed.take(b"x" * 100_000, error=False)
  assert len(lines) == 1


def test_output_is_appended_to_files(lines, tmp_path):
  file = tmp_path / "replica-2.log"
  for text in (b"a\rb\n", b"second"):
    printed = _printed(lines, folder=tmp_path)
    printed.take(text, error=False)
    printed.end()
  parts = file.read_bytes().split(b"--- replica 2, started ")
  assert [p[20:] for p in parts[1:]] == [b"a\rb\n", b"second"]


def test_streams_are_labelled_separately(capsys):
  output.echo("replica 0", "to out", False)
  output.echo("replica 0", "to err", True)
  out, err = capsys.readouterr()
  assert (out, err) == ("[replica 0] to out\n", "[replica 0] to err\n")


def test_a_log_goes_on_once_there_is_room(lines, tmp_path):
  path = tmp_path / "replica-2.log"
  printed = _printed(lines, folder=tmp_path)
  begins = path.read_text()
  with full_disk.files_end_at(len(begins)):
    printed.take(b"lost\n", error=False)
    printed.take(b"too\n", error=False)
  printed.take(b"kept\n", error=False)
  printed.end()
  said = [line for _, line, error in lines if error]
  assert [line.partition(":")[0] for line in said] == [
    *("its log ends here", "its log goes on")
  ]
  assert path.read_text() == f"{begins}\n--- 9 bytes are missing here\nkept\n"


def test_a_file_that_can_not_be_written_does_not_end_training(lines, tmp_path):
  (tmp_path / "replica-2.log").symlink_to("/dev/full")
  printed = _printed(lines, folder=tmp_path)
  printed.take(b"goes on\n", error=False)
  printed.end()
  assert lines == [
    ("replica 2", f"its log ends here: {os.strerror(errno.ENOSPC)}", True),
    ("replica 2", "goes on", False),
  ]


def test_output_that_cannot_be_printed_is_dropped(monkeypatch):
  with open("/dev/full", "w") as full:
    monkeypatch.setattr(sys, "stdout", full)
    output.echo("replica 2", "to a full disk", False)
    with contextlib.suppress(OSError):
      full.close()
