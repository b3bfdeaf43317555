"""Processes, and what is left of them, as the system sees them (Linux)."""

import contextlib
import os
import pathlib

import waiting


def is_running(pid):
  """Whether a process runs; zombies do not count."""
  fields = _fields(pid)
  return fields is not None and fields[0] != "Z"


def wait_for_end(*pids):
  """Waits until none of these processes runs."""
  left = lambda: [pid for pid in pids if is_running(pid)]
  waiting.until(lambda: not left(), left)


def started_by(parent):
  """The command lines of the child processes of a process, by number.

  Processes that end meanwhile are left out.
  """
  result = {}
  for pid, fields in _every().items():
    if int(fields[1]) == parent:
      with contextlib.suppress(OSError):
        result[pid] = pathlib.Path(f"/proc/{pid}/cmdline").read_text()
  return result


def groups(pid):
  """The process groups of the descendants of a process, without its own."""
  every = _every()
  result, parents = set(), {pid}
  for _ in range(4):
    for one, fields in every.items():
      if int(fields[1]) in parents:
        parents.add(one)
        result.add(int(fields[2]))
  return result


def has_group(group):
  """Whether any process of the group runs; zombies do not count."""
  return any(
    int(fields[2]) == group and fields[0] != "Z" for fields in _every().values()
  )


def _every():
  """The `_fields` of every process, by number."""
  every = {
    int(name): _fields(name) for name in os.listdir("/proc") if name.isdecimal()
  }
  return {pid: fields for pid, fields in every.items() if fields is not None}


def _fields(pid):
  """State, parent, group and more of a process; None if there is none."""
  try:
    stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
  except OSError:
    return None
  return stat.rpartition(")")[2].split()
