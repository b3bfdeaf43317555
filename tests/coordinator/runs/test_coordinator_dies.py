"""The coordinator's process dies, and any replica on its host starts it again."""

import contextlib
import os
import pathlib
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib

import embedded_runs as runs
import jax
import jax.numpy as jnp
import optax
import outcomes
import pytest
from waiting import until

from optax_dist import coordinator
from optax_dist.coordinator import journal
from optax_dist.coordinator._internal import phases
from optax_dist.coordinator.server import process
from optax_dist.coordinator.transport import addresses
from tests.runs import checks

_SECRET = "a secret of enough bytes"
_TIMEOUT = 120.0


class Place:
  """The coordinator's address, log and journal, and options of its replicas."""

  def __init__(self, folder: pathlib.Path):
    (self.port,) = addresses.free_ports()
    self.log = process.default_log(self.port)
    self.journal = folder / "journal.jsonl"
    self.options = {
      "coordinator_address": f"127.0.0.1:{self.port}",
      "secret": _SECRET,
      "timeout": _TIMEOUT,
      "transfer_timeout": 20.0,
      "journal": str(self.journal),
      "fingerprint_every": 1,
    }

  def pid(self) -> int:
    """The coordinator's process; 0 for none."""
    try:
      holder = pathlib.Path(f"{self.log}.lock").read_text()
      pid = int(holder.rpartition(" ")[2] or 0)
      # Its number may be another process's by now.
      command = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
      return 0
    return pid if str(self.port).encode() in command else 0

  def signal(self, number: int) -> None:
    """Sends the coordinator a signal."""
    pid = self.pid()
    assert pid > 1, "no coordinator"
    os.kill(pid, number)

  def kill(self) -> None:
    """Kills the coordinator."""
    self.signal(signal.SIGKILL)

  def end(self) -> None:
    """Kills it if it is still there."""
    with contextlib.suppress(AssertionError, ProcessLookupError):
      self.kill()

  def kill_twice(self) -> None:
    """Kills it, and the next one as soon as it has the log."""
    before = self.pid()
    self.kill()
    until(lambda: self.pid() not in (0, before))
    self.kill()

  def records(self) -> list:
    return journal.read(self.journal).records if self.journal.exists() else []


@pytest.fixture
def place(tmp_path, monkeypatch):
  # Its log is among temporary files.
  monkeypatch.setenv("TMPDIR", str(tmp_path))
  made = Place(tmp_path)
  yield made
  made.end()


class Loop(threading.Thread):
  """A replica that trains until all are to finish."""

  def __init__(self, number, place, ending, **options):
    super().__init__(daemon=True)
    self.number, self._ending = number, ending
    self._options = place.options | options
    self.seen = outcomes.none_yet() | {"prints": {}, "waited": 0.0}
    self.step, self.error = 0, None
    self.before_step = self.before_end = lambda: None
    self.gradient = lambda replica, number: runs.compute(replica, number)[0]

  def run(self):
    try:
      self._train()
    except BaseException as error:
      self.error = error

  def _train(self):
    seen = self.seen
    with coordinator.join(
      runs.OPT, runs.PARAMS, replica=self.number, **self._options
    ) as replica:
      while not (self._ending.is_set() or replica.finished):
        self.before_step()
        number = len(seen["calls"])
        seen["calls"].append(number)
        grads = self.gradient(replica, number)
        outcome = replica.step(grads, batch=[self.number, 0, number])
        outcomes.note(seen, number, outcome)
        seen["waited"] = max(seen["waited"], outcome.waited)
        seen["prints"][outcome.global_step] = replica.fingerprint()
        self.step = outcome.global_step
      self.before_end()
      replica.finish()
      seen["prints"][replica.global_step] = replica.fingerprint()
      seen["step"], seen["stats"] = replica.global_step, replica.stats()


def _finish(place, loops, ending):
  """Ends a run, and checks all of it; returns its journal."""
  ending.set()
  for loop in loops:
    loop.join(_TIMEOUT)
  assert [(loop.error, loop.is_alive()) for loop in loops] == [
    (None, False)
  ] * len(loops)
  # The coordinator writes it once all replicas are notified.
  until(lambda: "finish" in {r["kind"] for r in place.records()})
  result = journal.read(place.journal)
  assert not result.problems
  reports = [(loop.number, 0, loop.seen) for loop in loops]
  _, problems = checks.check(result.records, reports, _TIMEOUT)
  assert problems + checks.nobody_removed(reports) == []
  assert [r for r in result.records if r["kind"] == "lost"] == []
  return result.records


def _begin(place, count, **options):
  ending = threading.Event()
  options = {"total_num_replicas": count} | options
  loops = [Loop(i, place, ending, **options) for i in range(count)]
  for loop in loops:
    loop.start()
  return loops, ending


def _wait(loops, more=4):
  """Waits until all have taken some more steps."""
  aims = [(loop, loop.step + more) for loop in loops]
  until(
    lambda: (
      any(loop.error for loop in loops)
      or all(loop.step >= aim for loop, aim in aims)
    )
  )


def _epochs(records):
  return [r["epoch"] for r in records if r["kind"] == "coordinator"]


@pytest.mark.parametrize("inline_bytes", [64 << 10, 0])
def test_killed_coordinator_is_restarted(place, inline_bytes):
  """Even twice in a row, no gradient or step is lost or counts twice."""
  loops, ending = _begin(place, 2, inline_bytes=inline_bytes)
  for kill in (place.kill, place.kill_twice, place.kill):
    _wait(loops)
    kill()
  _wait(loops)
  records = _finish(place, loops, ending)
  # The second of two in a row may not have come so far.
  assert max(_epochs(records)) in (3, 4)
  (end,) = [r for r in records if r["kind"] == "finish"]
  accepted = sum(len(loop.seen["accepted"]) for loop in loops)
  assert end["ledger"]["applied"] == accepted
  # A replica may submit while the other finishes.
  assert {*end["ledger"]["dropped"]} <= {"finished"}


@pytest.mark.parametrize("inline_bytes", [64 << 10, 0])
def test_last_journal_line_counts_gradients_of_all_coordinators(
  place, inline_bytes
):
  loops, ending = _begin(place, 2, inline_bytes=inline_bytes)
  _wait(loops)
  broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), runs.PARAMS)
  right = loops[1].gradient

  def once(replica, number):
    loops[1].gradient = right
    return broken

  loops[1].gradient = once
  until(lambda: loops[1].seen["reasons"])
  # The log has a dropped gradient with the next commit.
  _wait(loops)
  place.kill()
  _wait(loops)
  records = _finish(place, loops, ending)
  (end,) = [r for r in records if r["kind"] == "finish"]
  accepted = sum(len(loop.seen["accepted"]) for loop in loops)
  assert end["ledger"]["applied"] == accepted
  dropped = dict(end["ledger"]["dropped"])
  reasons = [r["reason"] for r in records if r["kind"] == "drop"]
  # A replica may submit while the other finishes.
  finished = dropped.pop("finished", 0)
  assert finished <= 1
  assert dropped == {"non_finite": 1}
  for said in reasons, loops[1].seen["reasons"].values():
    assert [reason for reason in said if reason != "finished"] == ["non_finite"]


@pytest.mark.parametrize("phase", ["joining", "fetching_snapshot", "serving"])
def test_replica_joins_though_the_coordinator_is_killed_meanwhile(place, phase):
  loops, ending = _begin(
    place, 2, total_num_replicas=3, replicas_to_aggregate=2
  )
  _wait(loops)
  killed = []

  def reached(where, who):
    if where == phase and not killed and (who == 2 or phase == "serving"):
      killed.append(who)
      place.kill()

  phases.listen(reached)
  try:
    late = {"total_num_replicas": 3, "replicas_to_aggregate": 2}
    loops.append(Loop(2, place, ending, **late))
    loops[-1].start()
    _wait(loops)
  finally:
    phases.listen(None)
  assert killed
  _finish(place, loops, ending)


def test_run_ends_though_the_coordinator_is_killed_at_its_end(place):
  loops, ending = _begin(place, 2)
  _wait(loops)
  # By the first to end, for whose gradient the other one may wait.
  first = threading.Lock()

  def kill():
    if first.acquire(blocking=False):
      place.kill()

  for loop in loops:
    loop.before_end = kill
  records = _finish(place, loops, ending)
  assert records[-1]["kind"] == "finish"


def test_journal_records_the_end_of_the_run_once(place):
  """The first coordinator may not have had time to write it."""
  log = place.journal.with_name("log")
  start = lambda: process.start(_SECRET.encode(), port=place.port, log=log)
  with start():
    loops, ending = _begin(place, 1, start_coordinator=False)
    _wait(loops)
    whole = [r["kind"] for r in _finish(place, loops, ending)]
  lines = place.journal.read_bytes().splitlines(keepends=True)
  place.journal.write_bytes(b"".join(lines[:-1]))
  for _ in range(2):
    with start():
      pass
    assert [r["kind"] for r in place.records()] == whole
  assert whole[-1] == "finish"


def test_stopped_coordinator_is_not_replaced_and_continues(place):
  """The replicas do not replace it: two coordinators would be worse than a pause."""
  loops, ending = _begin(place, 2, silence_timeout=1.0)
  _wait(loops)
  pid = place.pid()
  place.signal(signal.SIGSTOP)
  try:
    time.sleep(2.5)
  finally:
    place.signal(signal.SIGCONT)
  _wait(loops)
  assert place.pid() == pid
  ending.set()
  for loop in loops:
    loop.join(_TIMEOUT)
  assert [loop.error for loop in loops] == [None, None]


def test_idle_coordinator_is_not_taken_for_dead(place):
  """Its members allow only a short silence."""
  loops, ending = _begin(place, 2, silence_timeout=0.6)
  _wait(loops)
  for loop in loops:
    loop.before_step = lambda: time.sleep(1.5)
  _wait(loops, more=1)
  _finish(place, loops, ending)


_REPLICA = """
import sys, jax.numpy as jnp, optax
from optax_dist import coordinator

number, address, secret = sys.argv[1:]
with coordinator.join(
  optax.sgd(0.1), jnp.zeros(40), replica=int(number), total_num_replicas=2,
  coordinator_address=address, secret=secret, lower_on_loss=True, timeout=120.0,
) as replica:
  print("in", flush=True)
  while not replica.finished:
    replica.step(jnp.ones(40))
    print(replica.global_step, flush=True)
"""


def test_replica_restarts_a_coordinator_that_another_process_started(place):
  """The process that has started it dies with it."""
  command = [sys.executable, "-c", _REPLICA]
  secrets = [place.options["coordinator_address"], _SECRET]
  env = os.environ | {"JAX_PLATFORMS": "cpu"}
  first = subprocess.Popen(
    [*command, "0", *secrets], stdout=subprocess.PIPE, text=True, env=env
  )
  second = None
  try:
    until(place.pid)
    second = subprocess.Popen(
      [*command, "1", *secrets], stdout=subprocess.PIPE, text=True, env=env
    )
    assert first.stdout.readline() == "in\n"
    assert second.stdout.readline() == "in\n"
    for _ in range(3):
      step = int(second.stdout.readline())
    first.kill()
    place.kill()
    while int(second.stdout.readline()) < step + 20:
      pass
  finally:
    for one in (first, second):
      if one is not None:
        one.kill()
        one.wait()
        one.stdout.close()


def test_replicas_do_not_restart_a_coordinator_with_its_own_log(
  place, tmp_path, caplog
):
  """With systemd, say: replicas on its host would take its port and its journal."""
  place.log.parent.mkdir()
  place.log.touch()  # Of an earlier job at this port.
  own = {"port": place.port, "log": str(tmp_path / "own.log")}
  with process.start(_SECRET.encode(), **own) as first:
    loops, ending = _begin(place, 2)
    _wait(loops)
    first.kill()
    until(lambda: "is gone" in caplog.text)
    with process.start(_SECRET.encode(), **own):
      _wait(loops)
      records = _finish(place, loops, ending)
  assert max(_epochs(records)) == 1


# Logs that can't be continued.


def _framed(raw: bytes) -> bytes:
  head = struct.pack("<II", len(raw), zlib.crc32(raw))
  return head + struct.pack("<I", zlib.crc32(head)) + raw


_MAGIC = b"optax-dist log, format 3\n"


@pytest.mark.parametrize(
  ("content", "words"),
  [
    (b"\x7fELF and more", "is no log of this version"),
    (b"optax-dist log, format 99\n", "is no log of this version"),
    (
      _MAGIC + _framed(b"abc").replace(b"abc", b"abd") + _framed(b"abc"),
      "is damaged at byte 25",
    ),
    # It would be beyond the end of the file.
    (_MAGIC + b"\xff" + _framed(b"abc")[1:] * 2, "is damaged at byte 25"),
    (_MAGIC + _framed(b"abc"), "a record that this version can't read"),
  ],
  ids=["foreign", "format", "damaged", "length", "record"],
)
def test_unreadable_log_is_named(place, content, words):
  place.log.parent.mkdir(parents=True)
  place.log.write_bytes(content)
  with pytest.raises(coordinator.CoordinatorError, match=words) as result:
    coordinator.join(
      optax.sgd(0.1),
      jnp.zeros(2),
      replica=0,
      total_num_replicas=1,
      **place.options,
    )
  assert str(place.log) in str(result.value)
  assert place.log.read_bytes() == content  # Nobody has touched it.


def test_unwritable_log_is_named(place):
  place.log.parent.write_text("a file in place of its folder")
  with pytest.raises(
    coordinator.CoordinatorError, match=f"{place.log} can't be written"
  ):
    coordinator.join(
      optax.sgd(0.1),
      jnp.zeros(2),
      replica=0,
      total_num_replicas=1,
      **place.options,
    )


@pytest.mark.parametrize(
  "written",
  [_framed(bytes(100))[:3], _framed(bytes(100))[:30], bytes(300)],
  ids=["head", "record", "zeros"],
)
def test_partially_written_record_is_cut_off(place, written):
  """As by a kill in the middle of a write, or a loss of power."""
  loops, ending = _begin(place, 2)
  _wait(loops)
  place.signal(signal.SIGSTOP)  # Nobody may start it again meanwhile.
  with place.log.open("ab") as log:
    log.write(written)
  place.kill()
  _wait(loops)
  records = _finish(place, loops, ending)
  assert max(_epochs(records)) == 1
