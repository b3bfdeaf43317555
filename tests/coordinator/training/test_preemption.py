"""SIGTERM: a replica leaves after its step, and nothing is lost."""

import os
import signal
import subprocess
import sys
import threading

import dropped_signals
import embedded_runs as runs
import jax.numpy as jnp
import optax
import pytest

from optax_dist import coordinator
from optax_dist.coordinator.runtime import driver, endpoint
from optax_dist.coordinator.server import process
from optax_dist.coordinator.training import preemption
from optax_dist.coordinator.transport import addresses

_SECRET = "a secret of enough bytes"


def test_replica_leaves_after_half_of_the_grace_period():
  made = preemption.Preemption("save", 0.0)
  made.joined()
  made._on_signal(signal.SIGTERM, None)
  assert not made.is_time(save=True, settled=True)
  assert made.is_time(save=False, settled=False)


def test_suppressed_exit_before_joining_ends_the_replica_later():
  made = preemption.Preemption("leave", 60.0)
  made.check()
  with pytest.raises(SystemExit):
    made._on_signal(signal.SIGTERM, None)
  with pytest.raises(SystemExit, match="143"):
    made.check()
  made.joined()
  assert made.is_time(save=False, settled=True)


def test_handlers_of_the_program_are_left_in_place():
  made = preemption.Preemption("leave")
  mine = lambda number, frame: None
  before = signal.signal(signal.SIGTERM, mine)
  try:
    made.install()
    assert signal.getsignal(signal.SIGTERM) is mine
    made.remove()
    assert signal.getsignal(signal.SIGTERM) is mine
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    made.install()
    assert signal.getsignal(signal.SIGTERM) == made._on_signal
    made.remove()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
  finally:
    signal.signal(signal.SIGTERM, before)
  with_interrupts = preemption.Preemption("leave", interrupts=True)
  before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
  interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
  try:
    with_interrupts.install()
    with_interrupts.joined()
    os.kill(os.getpid(), signal.SIGINT)
    assert with_interrupts.received
    with_interrupts.remove()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
  finally:
    signal.signal(signal.SIGTERM, before)
    signal.signal(signal.SIGINT, interrupt)
  before = signal.getsignal(signal.SIGTERM)
  thread = threading.Thread(target=made.install)
  thread.start()
  thread.join()
  assert signal.getsignal(signal.SIGTERM) is before
  with pytest.raises(ValueError, match="`on_sigterm` must be one of"):
    preemption.Preemption("stop")


@pytest.mark.parametrize(("mode", "grace"), [("leave", 60.0), ("save", 0.0)])
def test_replica_that_only_abandons_gradients_leaves_on_sigterm(mode, grace):
  """A replica that is too slow for every step: `if is_stale: abandon(); continue`."""
  one = runs.make(endpoint.World(), 0, k=1, n=1)
  made = preemption.Preemption(mode, grace)
  one.heed(made)
  with one.start():
    assert not one.abandon().finished
    made._on_signal(signal.SIGTERM, None)
    assert one.abandon().finished
    assert one.has_left


def test_waiting_replica_leaves_after_half_of_the_grace_period():
  """The others take longer than the grace period of its scheduler."""
  left = threading.Event()

  def train(replica):
    if replica.replica == 1:
      assert left.wait(60.0)
      return replica.step(jnp.ones(4))
    made = preemption.Preemption("leave", 400.0)
    made.joined()
    made._on_signal(signal.SIGTERM, None)
    made._since -= 201.0
    replica.heed(made)
    outcome = replica.step(jnp.ones(4))
    left.set()
    assert replica.has_left
    return outcome

  first, second = coordinator.run_embedded(
    train, 2, optax.sgd(0.1), jnp.zeros(4), timeout=60.0
  )
  assert (first.finished, first.accepted, first.global_step) == (True, False, 0)
  assert second.members == (1,)


def test_replica_whose_coordinator_is_gone_leaves_before_it_is_killed(caplog):
  """No coordinator confirms its departure, and its program may save its state."""
  place = process.start(_SECRET.encode())
  with coordinator.join(
    optax.sgd(0.1),
    jnp.zeros(4),
    coordinator_address=place.address,
    secret=_SECRET,
    total_num_replicas=1,
    replica=0,
    start_coordinator=False,
    timeout=8.0,
  ) as replica:
    assert replica.step(jnp.ones(4)).global_step == 1
    place.kill()
    made = preemption.Preemption("leave", 0.0)
    made.joined()
    made._on_signal(signal.SIGTERM, None)
    replica.heed(made)
    assert replica.step(jnp.ones(4)).finished
    assert replica.finished
    assert replica.has_left
    assert replica.global_step == 1
    replica.finish()
  assert "Replica 0 leaves without a confirmation" in caplog.text


@pytest.mark.parametrize("mode", ["leave", "save"])
def test_preempted_replica_leaves_without_losing_a_gradient(mode, tmp_path):
  """The other replica continues, as a thread, and then ends the run."""
  options = {
    "total_num_replicas": 2,
    "secret": _SECRET,
    "timeout": 60.0,
    "start_coordinator": False,
  }
  seen, left = {0: [], 1: []}, threading.Event()

  def train(number, replica, until):
    while not replica.finished and not until(replica):
      outcome = replica.step(jnp.ones(4))
      seen[number].append(outcome)

  def other():
    with coordinator.join(
      optax.sgd(0.1), jnp.zeros(4), replica=1, **options
    ) as replica:
      train(1, replica, lambda r: left.is_set() and r.global_step >= 30)
      replica.finish()

  with process.start(_SECRET.encode(), port=0) as place:
    options["coordinator_address"] = place.address
    thread = threading.Thread(target=other)
    thread.start()
    with coordinator.join(
      optax.sgd(0.1), jnp.zeros(4), replica=0, on_sigterm=mode, **options
    ) as replica:
      train(0, replica, lambda r: r.global_step >= 5)
      os.kill(os.getpid(), signal.SIGTERM)
      train(0, replica, lambda r: False)
      assert replica.has_left
      assert replica.finished
      # A loop that looks at the outcome only ends as well.
      assert replica.step(jnp.ones(4)).finished
    left.set()
    thread.join(120.0)
    assert not thread.is_alive()
  assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
  assert all(outcome.accepted for outcome in seen[0])
  assert seen[0][-1].finished
  assert any(outcome.save for outcome in seen[0]) == (mode == "save")
  assert any(outcome.save for outcome in seen[1]) == (mode == "save")
  # Its accepted gradients are in the steps that the other replica saw.
  joint = [o.global_step for o in seen[1] if o.members == (0, 1)]
  assert len(joint) == len(seen[0])
  assert seen[1][-1].global_step >= 30


@pytest.mark.parametrize("dropped", [False, True])
def test_a_preempted_replica_that_waits_for_admission_ends_at_once(
  dropped, monkeypatch, caplog
):
  """No coordinator answers, and the replica would wait for its timeout."""
  before = runs.coordinator_threads(timeout=0.0)
  original = driver.Driver.start

  def start(self, *arguments):
    original(self, *arguments)
    if dropped:
      dropped_signals.come(signal.SIGTERM, monkeypatch)
    else:
      os.kill(os.getpid(), signal.SIGTERM)

  monkeypatch.setattr(driver.Driver, "start", start)
  (port,) = addresses.free_ports()
  with pytest.raises(SystemExit) as stopped:
    coordinator.join(
      optax.sgd(0.1),
      jnp.zeros(4),
      replica=0,
      total_num_replicas=1,
      coordinator_address=f"127.0.0.1:{port}",
      start_coordinator=False,
      timeout=5.0,
      on_sigterm="leave",
    )
  assert stopped.value.code == 128 + signal.SIGTERM
  assert "Replica 0 ends before it has joined" in caplog.text
  assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
  assert not runs.coordinator_threads(before)


_FORKS = """
import multiprocessing, os, signal, sys, time
import jax.numpy as jnp, optax
from optax_dist import coordinator
from optax_dist.coordinator.server import process

signal.alarm(240)  # Should anything hang.
secret = "a secret of enough bytes"
with process.start(secret.encode(), port=0) as place:
  with coordinator.join(
    optax.sgd(0.1), jnp.zeros(4), replica=0, total_num_replicas=1,
    coordinator_address=place.address, secret=secret,
    start_coordinator=False, on_sigterm="leave",
  ) as replica:
    replica.step(jnp.ones(4))
    fork = multiprocessing.get_context("fork")
    begun = fork.Event()  # Python loses a signal that comes as it forks.
    child = fork.Process(target=lambda: begun.set() or time.sleep(240))
    child.start()
    begun.wait()
    child.terminate()
    child.join()
    assert child.exitcode == -signal.SIGTERM
    for how in (sys.exit, "/".join):
      child = os.fork()
      if not child:
        how(0)  # By an exception, as a worker ends, or that of a fault.
      assert os.waitpid(child, 0)[1] == (0 if how is sys.exit else 1 << 8)
    assert not replica.finished
    assert replica.step(jnp.ones(4)).accepted
  assert replica.has_left
print("well")
"""


def test_forked_child_is_not_a_replica():
  """A data loader's workers end by SIGTERM, and don't speak for the replica."""
  done = subprocess.run(
    [sys.executable, "-c", _FORKS],
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    timeout=280.0,
  )
  assert done.stdout.splitlines()[-1:] == ["well"], done.stderr
