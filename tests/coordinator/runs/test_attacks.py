"""Tests that a run survives bad members, forks, exceptions and interrupts.

Replicas are threads that speak over sockets, as processes do.
"""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import optax
import proxies
import pytest
from waiting import until

from optax_dist import coordinator, ledger
from optax_dist.coordinator.protocol import codec, entries, messages
from optax_dist.coordinator.runtime import endpoint
from optax_dist.coordinator.server import process as server
from optax_dist.coordinator.transport import interface as transports
from optax_dist.coordinator.transport import sockets

SECRET = "a secret of enough bytes"
# Longer than any test waits: an error that comes at once is not a timeout.
PATIENT = {
  "timeout": 300.0,
  "transfer_timeout": 100.0,
  "silence_timeout": 100.0,
}
PARAMS = {"w": jnp.ones(40)}
OPT = optax.sgd(0.1)


@pytest.fixture(scope="module")
def server_address(tmp_path_factory):
  """The address of one coordinator for all tests, since a process starts slowly."""
  log = tmp_path_factory.mktemp("coordinator") / "log"
  with server.start(SECRET.encode(), port=0, log=log) as made:
    yield made.address


@pytest.fixture
def job(server_address):
  """The options by which to join a run of its own."""
  return {
    "coordinator_address": server_address,
    "run": secrets.token_hex(8),
    "secret": SECRET,
    "start_coordinator": False,
    "total_num_replicas": 2,
  } | PATIENT


class Loop(threading.Thread):
  """A replica that trains until it is stopped."""

  def __init__(self, number, options, act=lambda replica, step: None):
    super().__init__(daemon=True)
    self.number, self.options, self.act = number, options, act
    self.stopping = threading.Event()
    self.joined = threading.Event()
    self.replica, self.step, self.error = None, 0, None

  def run(self):
    try:
      with coordinator.join(
        OPT, PARAMS, replica=self.number, **self.options
      ) as self.replica:
        self.joined.set()
        while not (self.stopping.is_set() or self.replica.finished):
          self.act(self.replica, self.step)
          self.replica.step(jax.tree.map(jnp.ones_like, self.replica.params))
          self.step = self.replica.global_step
        # If it left, the last replica would wait for lost ones.
        self.replica.finish()
    except BaseException as error:
      self.error = error
    finally:
      self.joined.set()


def stop(*loops):
  for loop in loops:
    loop.stopping.set()
  for loop in loops:
    loop.join(60.0)
    assert not loop.is_alive()


@pytest.mark.parametrize("inline_bytes", [64 << 10, 0])
def test_an_exception_in_a_running_process_is_reported_at_once(
  job, inline_bytes
):
  job |= {"lower_on_loss": True, "inline_bytes": inline_bytes}

  def fail(replica, step):
    if step >= 5:
      raise ZeroDivisionError

  one, two = Loop(0, job), Loop(1, job, fail)
  one.start()
  one.joined.wait(60.0)
  two.start()
  two.join(60.0)
  assert not two.is_alive()
  assert isinstance(two.error, ZeroDivisionError)
  step = one.step
  # Long before the silence after which a peer is lost.
  until(lambda: one.step > step + 5)
  stop(one)
  assert one.error is None


def test_run_continues_without_a_journal_that_cannot_be_opened(
  job, tmp_path, caplog
):
  job |= {"journal": str(tmp_path / "none" / "journal.jsonl")}
  loops = Loop(0, job), Loop(1, job)
  for loop in loops:
    loop.start()
  until(lambda: min(loop.step for loop in loops) > 5)
  stop(*loops)
  assert [loop.error for loop in loops] == [None, None]
  assert "training goes on without it" in caplog.text


def test_a_malformed_message_is_refused_and_counted(job, caplog):
  """Signed as a member's, and of another version or of plain nonsense."""
  loops = Loop(0, job), Loop(1, job)
  for loop in loops:
    loop.start()
  until(lambda: min(loop.step for loop in loops) > 3)
  one, other = loops
  transport = other.replica._participant.driver._transport

  def attack():
    for raw in (b"", b"\xff" * 50, b'{"a": 1}'):
      transport.send(endpoint.COORDINATOR, [raw])
    hello = messages.Leave(False, "x")
    bad = codec.replace(hello, lost=-3)
    transport.send(endpoint.COORDINATOR, [messages.MESSAGES.encode(bad)])

  other.replica._participant.driver.loop.call_soon(attack)
  step = one.step
  until(lambda: one.step > step + 10)
  stop(*loops)
  assert [loop.error for loop in loops] == [None, None]
  assert "bad message 3, of" in caplog.text
  assert "has rejected a message" in caplog.text


def _forged(replica):
  """Messages that only a coordinator may send, for a running run."""
  core = replica._participant.driver._core
  epoch, step = core._known.epoch, core._known.read
  round_ = entries.RoundId(epoch, step, 0)
  mean = bytes(4 * 40)
  return (
    entries.Committed(round_, (), mean, False, (), ()),
    entries.Removed(core.incarnation, False, "forged"),
    entries.Removed(core.incarnation, True, "forged"),
    entries.Ended(step, "forged", "", ()),
    entries.Ended(0, "forged", "Diverged", ()),
    messages.Welcome(
      *(epoch + 1, "forged", 9, entries.Start(), 77, 0, ledger.NOTHING_DONE),
      *(True, True),
    ),
    messages.Cancel(round_),
    messages.Refused("forged"),
    messages.Refused("forged", True),
  )


def test_coordinator_messages_from_a_member_have_no_effect(job, caplog):
  # Members are connected to each other.
  job |= {"inline_bytes": 0}
  victim, evil = loops = Loop(0, job), Loop(1, job)
  for loop in loops:
    loop.start()
  until(lambda: min(loop.step for loop in loops) > 3)
  driver = evil.replica._participant.driver
  (peer,) = {*driver._transport.peers()} - {endpoint.COORDINATOR}
  records = _forged(victim.replica)

  def attack():
    for to in (peer, endpoint.COORDINATOR):
      for record in records:
        driver._transport.send(to, [messages.MESSAGES.encode(record)])

  step = victim.step
  driver.loop.call_soon(attack)
  own = evil.replica._participant.driver._transport.name
  for record in records:
    words = f"{own} sent a forged message: {type(record).__name__} of a process"
    until(lambda words=words: words in caplog.text)
  until(lambda: victim.step > step + 10)
  stop(*loops)
  assert [loop.error for loop in loops] == [None, None]
  assert victim.replica.fingerprint() == evil.replica.fingerprint()
  assert "is not for a coordinator" in caplog.text  # What evil was told.


def test_hello_with_a_later_epoch_does_not_end_the_coordinator(job):
  """Only the log can show that another coordinator is alive."""
  loops = one, _ = Loop(0, job), Loop(1, job)
  for loop in loops:
    loop.start()
  until(lambda: min(loop.step for loop in loops) > 3)
  of_job = one.replica._participant.driver._core._config.job
  answers = []
  for epoch in (7, 1 << 62):
    with contextlib.closing(
      sockets.Transport("liar", secret=SECRET.encode())
    ) as liar:
      liar.connect(endpoint.COORDINATOR, job["coordinator_address"], b"")
      hello = messages.Hello(
        *(of_job, 1, liar.address, entries.Start(), epoch, -1, 1, 0, -1),
      )
      liar.send(endpoint.COORDINATOR, [messages.MESSAGES.encode(hello)])
      heard = []

      def hear(liar=liar, heard=heard):
        for event in liar.poll(0.1):
          if isinstance(event, transports.Message):
            heard.append(messages.MESSAGES.decode(event.payload))
        return heard

      until(hear)
      answers += heard
  refused, rejected = answers
  assert "was welcomed by coordinator 7 of its run" in refused.reason
  assert refused.again
  assert isinstance(rejected, messages.Rejected)
  step = one.step
  until(lambda: one.step > step + 5)
  stop(*loops)
  assert [loop.error for loop in loops] == [None, None]


def test_process_with_the_name_of_the_coordinator_is_refused(job, caplog):
  """A member knows all that signatures between members need."""
  loops = Loop(0, job), Loop(1, job)
  for loop in loops:
    loop.start()
  until(lambda: min(loop.step for loop in loops) > 3)
  victim = loops[0].replica._participant.driver._transport
  with contextlib.closing(
    sockets.Transport(endpoint.COORDINATOR, secret=SECRET.encode())
  ) as evil:
    evil._identity.key = victim._identity.key
    evil.connect(victim.name, victim.address)
    lost = []
    until(lambda: lost.extend(evil.poll(0.1)) or lost)
  assert [(event.how, event.reason) for event in lost] == [
    (
      "refused",
      "it refused: \"this process calls 'coordinator', and never the reverse\"",
    )
  ]
  assert "at this host can't connect: this process calls" in caplog.text
  step = loops[0].step
  until(lambda: loops[0].step > step + 5)
  stop(*loops)
  assert [loop.error for loop in loops] == [None, None]
  assert "was removed" not in caplog.text


def test_strangers_and_replayed_bytes_end_only_their_own_connections(
  job, caplog
):
  host, _, port = job["coordinator_address"].rpartition(":")
  with proxies.threaded(job["coordinator_address"]) as proxy:
    loops = (
      Loop(0, job),
      Loop(1, job | {"coordinator_address": proxy.address}),
    )
    for loop in loops:
      loop.start()
    until(lambda: min(loop.step for loop in loops) > 3)
    recorded = bytes(proxy.there.taken)
    assert len(recorded) > 500
    for raw in (
      b"GET / HTTP/1.1\r\n\r\n",
      bytes(1000),
      bytes.fromhex("160301020001000001fc0303"),  # TLS begins like this.
      recorded[:50] + b"\xff" * 500,
      recorded,
    ):
      with socket.create_connection((host, int(port)), 60.0) as sock:
        with contextlib.suppress(OSError):
          sock.sendall(raw)
        with contextlib.suppress(ConnectionResetError):
          while sock.recv(4096):
            pass  # Until it is closed.
    steps = [loop.step for loop in loops]
    until(
      lambda: all(
        loop.step > step + 5 for loop, step in zip(loops, steps, strict=True)
      )
    )
    stop(*loops)
  assert [loop.error for loop in loops] == [None, None]
  assert "was removed" not in caplog.text


_FORKS = """
import multiprocessing, os, sys, time
import jax.numpy as jnp, optax
from optax_dist import coordinator

how, address, secret, run = sys.argv[1:]
with coordinator.join(
  optax.sgd(0.1), {"w": jnp.ones(40)}, replica=1, total_num_replicas=2,
  coordinator_address=address, secret=secret, run=run, start_coordinator=False,
  timeout=300.0, transfer_timeout=100.0, silence_timeout=100.0, lower_on_loss=True,
) as replica:
  for i in range(5):
    replica.step({"w": jnp.ones(40)})
  if how == "fork":
    child = os.fork()
    if not child:
      time.sleep(300)
      os._exit(0)
  else:
    made = multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,))
    made.start()
    child = made.pid
  print(child, flush=True)
  while True:
    replica.step({"w": jnp.ones(40)})
"""


@pytest.mark.parametrize(
  "how", ["fork", pytest.param("multiprocessing", marks=pytest.mark.nightly)]
)
def test_a_forked_child_does_not_hide_its_parents_death(job, how):
  job |= {"lower_on_loss": True}
  one = Loop(0, job)
  one.start()
  one.joined.wait(60.0)
  process = subprocess.Popen(
    [
      *(sys.executable, "-c", _FORKS, how, job["coordinator_address"]),
      *(SECRET, job["run"]),
    ],
    stdout=subprocess.PIPE,
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
  )
  child = int(process.stdout.readline())
  try:
    step = one.step
    until(lambda: one.step > step + 5)
    process.kill()
    process.wait()
    step = one.step
    # By a broken connection, not by silence.
    until(lambda: one.step > step + 10)
    os.kill(child, 0)  # It was there all the time.
  finally:
    process.kill()
    process.stdout.close()
    os.kill(child, signal.SIGKILL)
  stop(one)
  assert one.error is None


@pytest.mark.parametrize("width", [40, 100_000])
def test_interrupted_step_continues(job, width):
  """Ctrl-C in `step`, and the next one: inline gradients, and exchanged ones."""
  params = {"w": jnp.ones(width)}
  grads = {"w": jnp.ones(width)}
  wait = threading.Event()
  done = {}

  def slow():
    with coordinator.join(OPT, params, replica=1, **job) as replica:
      number = 0
      while not replica.finished:
        if number == 3:
          wait.wait(60.0)
        replica.step(grads)
        number += 1
      replica.finish()  # It may have been between two steps.
      done["print"] = replica.fingerprint()

  other = threading.Thread(target=slow, daemon=True)
  other.start()
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  try:
    with coordinator.join(OPT, params, replica=0, **job) as replica:
      for _ in range(3):
        assert replica.step(grads).accepted

      def interrupt():
        # It is in `step`, and waits.
        until(lambda: replica._participant.submission.pending >= 0)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

      interrupting = threading.Thread(target=interrupt)
      interrupting.start()
      with pytest.raises(KeyboardInterrupt):
        replica.step(grads)
      interrupting.join()
      wait.set()
      accepted = sum(replica.step(grads).accepted for _ in range(6))
      assert accepted >= 4
      assert replica.global_step >= 7
      replica.finish()
      assert sum(replica.stats()["gradients"].values()) >= 10
      result = replica.fingerprint()
  finally:
    signal.signal(signal.SIGINT, before)
  other.join(60.0)
  assert not other.is_alive()
  assert done["print"] == result
