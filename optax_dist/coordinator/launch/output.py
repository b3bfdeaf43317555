"""The output of launched processes: labelled in one stream, and in files."""

from __future__ import annotations

import collections
import contextlib
import io
import os
import pathlib
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import TextIO, TypeAlias

# Called with a label, a line, and whether it is from standard error.
Echo: TypeAlias = Callable[[str, str, bool], None]

# How many lines were lost since their pipe or terminal has no reader, for standard
# error (True) and output; seconds to wait for a reader; and characters to print at
# once, of four bytes each.
_lost: dict[bool, int] = {}
_PATIENCE, _AT_ONCE = 5.0, select.PIPE_BUF // 4
_LINES_KEPT = 12  # Lines.
_LONGEST = 64 << 10  # Longer lines are cut.


def echo(label: str, line: str, error: bool) -> None:
  """Prints a line with its label, to the stream that it came from.

  If the stream has no reader any more, the job is stopped as after the end of its
  terminal. If the line can't be written, as on a full disk, or in a pipe that is full
  for a while, it is lost, and the replicas go on training.
  """
  stream = sys.stderr if error else sys.stdout
  text = f"[{label}] {line}\n"
  lost = _lost.get(error, 0)
  if lost:
    text = (
      f"[launch] {lost} lines are lost that nobody has read in time\n{text}"
    )
  try:
    # In parts that a pipe takes whole if it has any room.
    for start in range(0, len(text), _AT_ONCE):
      if not _takes_more(stream, 0.0 if lost else _PATIENCE):
        _lost[error] = lost + 1
        return
      stream.write(text[start : start + _AT_ONCE])
      stream.flush()
    _lost[error] = 0
  except BrokenPipeError:
    signal.raise_signal(signal.SIGHUP)
  except OSError:
    pass


def _takes_more(stream: TextIO, seconds: float) -> bool:
  """Whether a stream takes more text, now or within so many seconds."""
  try:
    number = stream.fileno()
  except (OSError, ValueError):
    return True  # A Python object without a descriptor: it never blocks.
  poll = select.poll()
  poll.register(number, select.POLLOUT)
  return bool(poll.poll(1000 * seconds))


def _opened(path: str, flags: int) -> int:
  """Opens a file; raises an error instead of waiting if it is a pipe without reader."""
  return os.open(path, flags | os.O_NONBLOCK, 0o666)


class OutputRelay:
  r"""The output of one process.

  Whole lines are passed on, so those of several processes don't mix. Of a line
  that is overwritten repeatedly (a progress bar) the last state is passed on.

  Example:
    >>> printed = OutputRelay("replica 2", echo=echo)
    >>> printed.take(b"loss 0.5\nlo", error=False)
    [replica 2] loss 0.5
    >>> printed.take(b"ss 0.4\n", error=False)
    [replica 2] loss 0.4
  """

  def __init__(
    self,
    label: str,
    *,
    folder: pathlib.Path | None = None,
    echo: Echo = echo,
  ):
    """Creates it.

    Args:
      label: put before each line.
      folder: of the file that the output is appended to, unchanged, which is named
        after the label; None for no file.
      echo: called with each line.
    """
    self._label, self._echo = label, echo
    self._rest = {False: b"", True: b""}
    self._tail: collections.deque[str] = collections.deque(maxlen=_LINES_KEPT)
    self._file: io.FileIO | None = None
    # Bytes since the file could not be written.
    self._missing = 0
    self._path: pathlib.Path | None = None
    if folder is not None:
      self._path = folder / f"{label.replace(' ', '-')}.log"
      now = time.strftime("%Y-%m-%d %H:%M:%S")
      self._keep(f"--- {label}, started {now}\n".encode())

  def _keep(self, data: bytes) -> None:
    """Appends to the log; an error makes a gap in it, and does not end training."""
    if self._path is None:
      return
    try:
      if self._file is None:
        self._file = io.FileIO(self._path, "ab", opener=_opened)
      if self._missing:
        gap = f"\n--- {self._missing} bytes are missing here\n".encode()
        self._write(self._file, gap)
        self._missing = 0
        self._echo(self._label, "its log goes on", True)
      self._write(self._file, data)
    except OSError as error:
      if not self._missing:
        why = error.strerror or error
        self._echo(self._label, f"its log ends here: {why}", True)
      self._missing += len(data)

  def _write(self, file: io.FileIO, data: bytes) -> None:
    while data:
      data = data[file.write(data) or 0 :]

  def _close_file(self) -> None:
    if self._file is not None:
      with contextlib.suppress(OSError):
        self._file.close()
    self._file = self._path = None

  def take(self, data: bytes, error: bool) -> None:
    """Processes data that was read from one of its streams."""
    self._keep(data)
    *lines, rest = (self._rest[error] + data).split(b"\n")
    if len(rest) > _LONGEST:
      lines, rest = [*lines, rest], b""
    self._rest[error] = rest
    for line in lines:
      self._pass_on(line, error)

  def end(self) -> None:
    """Passes on an incomplete last line, at the end of the output."""
    for error, rest in self._rest.items():
      if rest:
        self._pass_on(rest, error)
    self._rest = {False: b"", True: b""}
    self._close_file()

  def tail(self) -> str:
    """The last lines."""
    return "\n".join(self._tail)

  def _pass_on(self, line: bytes, error: bool) -> None:
    text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
    self._tail.append(text)
    self._echo(self._label, text, error)
