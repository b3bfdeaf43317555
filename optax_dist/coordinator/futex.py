"""Waiting until another process has changed a word of shared memory (Linux).

A wait costs nothing while nothing happens, and ends some 0.05 ms after the
change. Where the system offers none, `is_available` says so, and who waits has
to look again and again (`polling`).

Source: Franke, Russell and Kirkwood 2002, Fuss, Futexes and Furwocks.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from collections.abc import Callable

import numpy as np

# The numbers of the system call; the C library has no function for it.
_NUMBERS = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE = 0, 1
_ALL = 2**31 - 1


class _Time(ctypes.Structure):
  _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@functools.cache
def _number() -> int | None:
  if sys.platform != "linux" or sys.byteorder != "little":
    return None
  if ctypes.sizeof(ctypes.c_void_p) != 8:
    return None
  return _NUMBERS.get(platform.machine())


def is_available() -> bool:
  """Whether this system is known to have them."""
  return _number() is not None


@functools.cache
def _syscall(keeps_interpreter: bool) -> Callable[..., int]:
  # A wake is too short to let other threads of this process go first.
  library = ctypes.PyDLL if keeps_interpreter else ctypes.CDLL
  function = library(None).syscall
  function.restype = ctypes.c_long
  function.argtypes = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int,
  )
  return function


class Word:
  """A number in shared memory that some change and others wait for.

  Example:
    >>> word = Word(np.zeros(1, np.uint64))
    >>> word.value = 3
    >>> word.wake()
    >>> word.wait(2, timeout=10.0)  # It is not 2 any more.
    >>> word.value
    3
  """

  def __init__(self, memory: np.ndarray):
    """Takes a word of memory.

    Args:
      memory: one uint64; it may be read-only for those who only wait.
    """
    if memory.dtype != np.uint64 or memory.shape != (1,):
      raise ValueError(
        "A word is an array of one uint64; got"
        f" {memory.dtype} of shape {memory.shape}."
      )
    self._memory = memory
    self._view = memory.data
    self._address = memory.__array_interface__["data"][0]
    self._number = _number()

  @property
  def value(self) -> int:
    """What the word is now."""
    return self._view[0]

  @value.setter
  def value(self, value: int) -> None:
    self._view[0] = value

  def wait(self, value: int, timeout: float) -> None:
    """Returns when somebody wakes who waits for the word, or earlier.

    Args:
      value: what it was when the caller last looked: if it differs by now, this
        returns at once.
      timeout: seconds until it returns in any case.
    """
    seconds = max(0.0, timeout)
    until = _Time(int(seconds), int(seconds % 1 * 1e9))
    low = value & 0xFFFFFFFF
    where, when = self._address, ctypes.addressof(until)
    _syscall(False)(self._number, where, _WAIT, low, when, None, 0)

  def wake(self) -> None:
    """Wakes all who wait for the word, in every process."""
    if self._number is not None:
      where = self._address
      _syscall(True)(self._number, where, _WAKE, _ALL, None, None, 0)
