"""Words of shared memory that are waited for."""

import mmap
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from optax_dist.coordinator import buffer_pool, futex

pytestmark = pytest.mark.skipif(
  not futex.is_available(), reason="this system has no futexes that are known"
)


@pytest.fixture
def file():
  file = buffer_pool.memory_file("test", 4096)
  yield file
  os.close(file)


def _word(file, **kwargs):
  memory = np.frombuffer(mmap.mmap(file, 4096, **kwargs), np.uint64)
  return futex.Word(memory[3:4])


def _seconds(call):
  began = time.monotonic()
  call()
  return time.monotonic() - began


def test_a_wait_ends_at_its_deadline_or_where_the_word_differs(file):
  word = _word(file)
  assert 0.05 <= _seconds(lambda: word.wait(0, 0.05)) < 5.0
  word.value = 7
  assert _seconds(lambda: word.wait(6, 20.0)) < 5.0
  assert _seconds(lambda: word.wait(7, -1.0)) < 5.0


def test_only_the_lower_half_counts(file):
  word = _word(file)
  word.value = 2**32 + 5
  assert word.value == 2**32 + 5
  assert 0.05 <= _seconds(lambda: word.wait(2**32 + 5, 0.05)) < 5.0


def test_a_reader_is_woken_in_read_only_memory(file):
  writer, reader = _word(file), _word(file, prot=mmap.PROT_READ)
  woken = threading.Event()

  def read():
    while not reader.value:
      reader.wait(0, 20.0)
    woken.set()

  thread = threading.Thread(target=read)
  thread.start()
  time.sleep(0.1)
  assert not woken.is_set()
  writer.value = 1
  writer.wake()
  assert woken.wait(5.0)
  thread.join()
  with pytest.raises(TypeError):
    reader.value = 2


_CODE = """
import mmap, sys, numpy as np
from optax_dist.coordinator import futex
file = open(f"/proc/{sys.argv[1]}/fd/{sys.argv[2]}", "r+b")
words = np.frombuffer(mmap.mmap(file.fileno(), 4096), np.uint64)
mine, yours = futex.Word(words[3:4]), futex.Word(words[4:5])
while not yours.value:
  yours.wait(0, 20.0)
mine.value = 1
mine.wake()
"""


def test_another_process_wakes_and_is_woken(file):
  word = _word(file)
  memory = np.frombuffer(mmap.mmap(file, 4096), np.uint64)
  other = futex.Word(memory[4:5])
  command = [sys.executable, "-c", _CODE, str(os.getpid()), str(file)]
  with subprocess.Popen(command) as child:
    other.value = 1
    other.wake()
    end = time.monotonic() + 60.0
    while not word.value and time.monotonic() < end:
      word.wait(0, 20.0)
    assert word.value == 1
    assert child.wait(20.0) == 0


@pytest.mark.parametrize(
  "memory", [np.zeros(1, np.int64), np.zeros(2, np.uint64)]
)
def test_a_word_is_one_number(memory):
  with pytest.raises(ValueError, match="array of one uint64; got"):
    futex.Word(memory)
