"""Tests that a run survives bad members, forks, exceptions and interrupts.

Replicas are threads that speak over sockets, as processes do.
"""

import os
import secrets
import signal
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import optax
import pytest
from waiting import until

from optax_dist import coordinator
from optax_dist.coordinator.protocol import codec, messages
from optax_dist.coordinator.runtime import endpoint
from optax_dist.coordinator.server import process as server

SECRET = "a secret of enough bytes"
# Nobody waits so long: of what is told at once a test sees that it is.
PATIENT = {"timeout": 300.0, "attempt_timeout": 100.0, "leader_timeout": 100.0}
PARAMS = {"w": jnp.ones(40)}
OPT = optax.sgd(0.1)


@pytest.fixture(scope="module")
def server_address(tmp_path_factory):
  """Of one for the runs of all tests; a process takes its time to start."""
  log = tmp_path_factory.mktemp("coordinator") / "log"
  with server.start(SECRET.encode(), port=0, log=log) as made:
    yield made.address


@pytest.fixture
def job(server_address):
  """What to join a run of a test's own by."""
  return {
    "coordinator_address": server_address,
    "run": secrets.token_hex(8),
    "secret": SECRET,
    "start_coordinator": False,
    "total_num_replicas": 2,
  } | PATIENT


class Loop(threading.Thread):
  """A replica that trains until it is told to stop."""

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
        # A last one that leaves would wait for those that were lost.
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


def test_a_journal_that_can_not_be_opened_ends_nothing(job, tmp_path, caplog):
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

  other.replica._participant.driver.post(attack)
  step = one.step
  until(lambda: one.step > step + 10)
  stop(*loops)
  assert [loop.error for loop in loops] == [None, None]
  assert "bad message 3, of" in caplog.text
  assert "has rejected a message" in caplog.text


_FORKS = """
import multiprocessing, os, sys, time
import jax.numpy as jnp, optax
from optax_dist import coordinator

how, address, secret, run = sys.argv[1:]
with coordinator.join(
  optax.sgd(0.1), {"w": jnp.ones(40)}, replica=1, total_num_replicas=2,
  coordinator_address=address, secret=secret, run=run, start_coordinator=False,
  timeout=300.0, attempt_timeout=100.0, leader_timeout=100.0, lower_on_loss=True,
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
def test_an_interrupted_step_goes_on(job, width):
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
      found = replica.fingerprint()
  finally:
    signal.signal(signal.SIGINT, before)
  other.join(60.0)
  assert not other.is_alive()
  assert done["print"] == found
