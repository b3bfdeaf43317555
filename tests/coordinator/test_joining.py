"""`join`, as a user calls it."""

import contextlib
import re
import signal
import socket
import threading
import time

import embedded_runs as runs
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
import served
import waiting

from optax_dist import coordinator
from optax_dist.coordinator import journal as journals
from optax_dist.coordinator import replica as replicas
from optax_dist.coordinator.launch import channel, starter
from optax_dist.coordinator.launch.environment import (
  Environment,
  ProcessEnvironment,
)
from optax_dist.coordinator.server import process
from optax_dist.coordinator.transport import addresses
from tests.coordinator.transport import worlds

# Only where something is wrong does anybody wait so long.
_PATIENT = {"timeout": 120.0, "transfer_timeout": 30.0, "silence_timeout": 10.0}


@pytest.fixture
def coordinators(monkeypatch):
  """The coordinators that `join` has started."""
  started, original = [], process.start

  def start(*args, **kwargs):
    started.append(original(*args, **kwargs))
    return started[-1]

  monkeypatch.setattr(process, "start", start)
  return started


def test_a_coordinator_that_join_starts_has_the_same_certificates(
  tmp_path, monkeypatch, coordinators
):
  monkeypatch.setattr(starter, "_IDLE", 120.0)
  files = worlds.certificates(tmp_path)
  with coordinator.join(
    optax.sgd(0.5),
    jnp.zeros(2),
    coordinator_address=f"localhost:{addresses.free_ports()[0]}",
    total_num_replicas=1,
    replica=0,
    certificates=files,
    bind="127.0.0.1",
    **_PATIENT,
  ) as replica:
    assert replica.step(jnp.ones(2)).accepted
  (started,) = coordinators
  started.stop()


def test_no_secret_is_needed_on_loopback(
  coordinators,
):
  with coordinator.join(
    optax.sgd(0.5),
    jnp.zeros(2),
    coordinator_address=f"127.0.0.1:{addresses.free_ports()[0]}",
    total_num_replicas=1,
    replica=0,
    bind="127.0.0.1",
    **_PATIENT,
  ) as replica:
    assert replica.step(jnp.ones(2)).accepted
  (started,) = coordinators
  started.stop()


def test_beyond_loopback_a_secret_is_needed():
  with pytest.raises(ValueError, match="A secret or certificates are"):
    coordinator.join(
      optax.sgd(0.5),
      jnp.zeros(2),
      coordinator_address="192.0.2.1:1",
      total_num_replicas=1,
      replica=0,
    )


def test_missing_arguments_come_from_the_environment(tmp_path, monkeypatch):
  secret = "a secret of enough bytes"
  (tmp_path / "secret").write_text(secret)
  journal = tmp_path / "journal.jsonl"
  with process.start(secret.encode(), port=0) as place:
    settings = Environment(
      coordinator_address=place.address,
      secret_file=str(tmp_path / "secret"),
      run="of two",
      num_replicas=2,
      replicas_to_aggregate=2,
      min_replicas=1,
      journal=str(journal),
    ).variables()
    settings |= ProcessEnvironment(replica=1, channel=1 << 20).variables()
    for name, value in settings.items():
      monkeypatch.setenv(name, value)
    # Replica 0 is passed what the other one takes from the environment.
    with (
      coordinator.join(
        optax.sgd(0.5),
        jnp.zeros(2),
        replica=0,
        total_num_replicas=2,
        replicas_to_aggregate=2,
        lower_on_loss=True,
        **_PATIENT,
      ) as first,
      coordinator.join(optax.sgd(0.5), jnp.zeros(2), **_PATIENT) as second,
    ):
      assert (first.replica, second.replica) == (0, 1)
      first.finish()
  (run, *_) = journals.read(journal).records
  assert (run["replicas_to_aggregate"], run["total_num_replicas"]) == (2, 2)


def test_a_script_that_defeats_min_replicas_is_warned(monkeypatch, caplog):
  settings = Environment(
    num_replicas=3, replicas_to_aggregate=2, min_replicas=1
  ).variables()
  settings |= ProcessEnvironment(replica=0).variables()
  for name, value in settings.items():
    monkeypatch.setenv(name, value)
  for lower_on_loss in (None, True, False):
    assert not caplog.messages
    # It ends there: there is no such strategy.
    with pytest.raises(TypeError, match="strategy"):
      coordinator.join(
        optax.sgd(0.5),
        jnp.zeros(2),
        coordinator_address="127.0.0.1:1",
        lower_on_loss=lower_on_loss,
        strategy="none",
      )
  (text,) = caplog.messages
  assert "lower_on_loss=False defeats --min-replicas 1: a step needs 2" in text


def test_replicas_listen_at_the_address_that_was_chosen_for_their_host(
  tmp_path, monkeypatch
):
  secret, journal = b"a secret of enough bytes", tmp_path / "journal.jsonl"
  with process.start(secret, port=0) as place:
    made = []
    for number, own in enumerate(("127.0.0.2", "127.0.0.3")):
      settings = Environment(local_addr=own, num_replicas=2).variables()
      settings |= ProcessEnvironment(replica=number).variables()
      for name, value in settings.items():
        monkeypatch.setenv(name, value)
      made.append(
        coordinator.join(
          optax.sgd(0.5),
          jnp.zeros(2),
          # By TCP, as from another host.
          coordinator_address=place.address,
          secret=secret,
          journal=journal,
          replicas_to_aggregate=1,
          **_PATIENT,
        )
      )
    made[0].finish()
    for one in made:
      one.close()
  addresses = [
    record["address"].partition(":")[0]
    for record in journals.read(journal).records
    if record["kind"] == "join"
  ]
  assert addresses == ["127.0.0.2", "127.0.0.3"]


@pytest.mark.parametrize(
  ("argument", "error", "said"),
  [
    ({"opt_state": {}}, ValueError, r"opt_state\[0\].*leave it out"),
    ({"opt_state": 3}, ValueError, "opt_state"),
    ({"leader_timout": 3.0}, TypeError, "Did you mean silence_timeout"),
  ],
)
def test_invalid_options_are_refused_by_name(argument, error, said):
  with pytest.raises(error, match=said):
    coordinator.run_embedded(
      lambda replica: None,
      1,
      optax.sgd(0.1, momentum=0.9),
      jnp.zeros(2),
      **argument,
    )


@pytest.mark.parametrize("wrong", [optax.sgd, None, "adam", 0.7])
def test_anything_but_an_optimizer_is_refused_by_name(wrong):
  said = "must be an optax.GradientTransformation"
  run = lambda opt, **options: coordinator.run_embedded(
    lambda replica: None, 1, opt, jnp.zeros(2), **options
  )
  with pytest.raises(TypeError, match=f"`opt` {said}"):
    run(wrong)
  with pytest.raises(TypeError, match=said):
    coordinator.as_optimizer(wrong, total_steps=3)
  for strategy in (coordinator.local_updates, coordinator.decoupled_diloco):
    with pytest.raises(TypeError, match=said):
      run(wrong, strategy=strategy())
    if wrong is not None:
      with pytest.raises(TypeError, match=said):
        strategy(wrong)


@pytest.mark.parametrize("local", [False, True])
def test_an_optimizer_that_needs_the_loss_is_refused_with_the_remedy(local):
  plateau = optax.contrib.reduce_on_plateau()
  strategy = coordinator.local_updates(plateau) if local else None
  opt = optax.chain(optax.sgd(0.1), *([] if local else [plateau]))
  said = "needs more than gradients: .*'value'.*set_hyperparams"
  with pytest.raises(TypeError, match=said):
    coordinator.run_embedded(
      lambda replica: None, 1, opt, jnp.zeros(2), strategy=strategy
    )
  with pytest.raises(TypeError, match=said):
    coordinator.as_optimizer(plateau, total_steps=3).tx.init(jnp.zeros(2))


def _join_at(address, **options):
  """Joins as the second of two replicas, and starts no coordinator."""
  return coordinator.join(
    optax.sgd(0.1),
    jnp.zeros(2),
    coordinator_address=address,
    total_num_replicas=2,
    replica=1,
    start_coordinator=False,
    **options,
  )


def test_the_address_of_an_absent_coordinator_is_reported():
  address = f"127.0.0.1:{addresses.free_ports()[0]}"
  with pytest.raises(coordinator.CoordinatorError) as caught:
    _join_at(
      address,
      # A connection has failed by then, though the machine stalls.
      timeout=3.0,
      transfer_timeout=0.1,
      silence_timeout=0.1,
    )
  said = str(caught.value)
  assert f"the coordinator at {address} is not connected" in said
  assert f"The coordinator could not be reached: {address}: Connection" in said


# A connection has failed well before.
_IMPATIENT = {"timeout": 3.0, "transfer_timeout": 0.1, "silence_timeout": 0.1}
_NOBODY = re.compile(
  r"Replica 1 has waited \d+\.\d s for admission to the run; the coordinator at"
)


def test_silent_stranger_at_the_coordinators_address_is_named():
  with socket.create_server(("127.0.0.1", 0)) as stranger:
    address = f"127.0.0.1:{stranger.getsockname()[1]}"
    with pytest.raises(coordinator.CoordinatorError) as caught:
      _join_at(address, **_IMPATIENT)
  said = str(caught.value)
  assert _NOBODY.match(said)
  assert f"what listens at {address} is not 'coordinator' of this job" in said
  assert "died" not in said


def test_a_stranger_that_talks_is_not_the_jobs_coordinator():
  with socket.create_server(("127.0.0.1", 0)) as stranger:
    address = f"127.0.0.1:{stranger.getsockname()[1]}"

    def talk():
      with stranger.accept()[0] as caller:
        caller.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        caller.recv(1000)

    threading.Thread(target=talk, daemon=True).start()
    said = f"the coordinator at {address}: it does not speak this protocol"
    with pytest.raises(coordinator.CoordinatorError, match=said):
      _join_at(address, **_PATIENT)


def test_unknown_host_name_of_the_coordinator_is_named(
  monkeypatch,
):
  known = socket.getaddrinfo

  def look_up(host, *rest, **options):
    if host == "coord.example":
      raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return known(host, *rest, **options)

  monkeypatch.setattr(socket, "getaddrinfo", look_up)
  with pytest.raises(coordinator.CoordinatorError) as caught:
    _join_at(
      "coord.example:29300",
      bind="127.0.0.1",
      secret=served.SECRET,
      **_IMPATIENT,
    )
  said = str(caught.value)
  assert _NOBODY.match(said)
  assert "the name 'coord.example' can't be resolved" in said
  assert "advertise" not in said


def test_join_waits_for_a_host_name_to_become_known(monkeypatch):
  """As that of a pod, whose coordinator starts as early as its replicas."""
  known, looks = socket.getaddrinfo, []

  def look_up(host, *rest, **options):
    if host == "coord.example":
      looks.append(host)
      if len(looks) < 3:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
      return known("127.0.0.1", *rest, **options)
    return known(host, *rest, **options)

  monkeypatch.setattr(socket, "getaddrinfo", look_up)
  monkeypatch.setattr(addresses, "_AGAIN_SECONDS", 0.01)
  assert process.Settings.at("coord.example:29300").advertise == "coord.example"
  with served.served() as address:
    port = address.rpartition(":")[2]
    looks.clear()
    options = {"secret": served.SECRET} | _PATIENT
    with _join_at(f"coord.example:{port}", **options) as replica:
      assert replica.global_step == 0


def test_unreachable_replicas_are_not_called_absent(monkeypatch):
  """Both advertise an address at which no process listens."""
  monkeypatch.setattr(addresses, "has_unix", lambda: False)
  (nobody,) = addresses.free_ports()
  with served.served() as address:
    options = {
      "coordinator_address": address,
      "secret": served.SECRET,
      "total_num_replicas": 2,
      "replicas_to_aggregate": 1,
      "inline_bytes": 0,
      "advertise": f"127.0.0.1:{nobody}",
      "bind": "127.0.0.1",
    }
    first = coordinator.join(
      optax.sgd(0.1),
      jnp.zeros(2),
      replica=0,
      **options,
    )
    # The next one needs its state.
    assert first.step(jnp.ones(2)).accepted
    with (
      contextlib.closing(first),
      pytest.raises(coordinator.CoordinatorError) as caught,
    ):
      coordinator.join(
        optax.sgd(0.1), jnp.zeros(2), replica=1, timeout=3.0, **options
      )
  said = str(caught.value)
  at = f"127.0.0.1:{nobody}"
  assert "the snapshot failed" in said
  assert f"{at}: Connection refused" in said


def test_waiting_for_a_coordinator_is_logged(caplog):
  """It comes once that is done, however long it takes."""
  (port,) = addresses.free_ports()
  address = f"127.0.0.1:{port}"
  waits = (
    "Replica 1 has not joined the run after 0.2 s, and waits for 127 s more. It"
    " waits for admission"
  )
  warnings = lambda: [text for text in caplog.messages if waits in text]
  joined = threading.Event()

  def serve():
    waiting.until(warnings)
    with served.served(port):
      joined.wait(120.0)

  thread = threading.Thread(target=serve)
  thread.start()
  try:
    _join_at(
      address,
      secret=served.SECRET,
      timeout=120.0,
      transfer_timeout=0.2,
      silence_timeout=2.0,
      stall_warning=0.2,
    ).close()
  finally:
    joined.set()
    thread.join()
  (text,) = warnings()
  assert f"the coordinator at {address} is not connected" in text


def test_a_caught_error_is_reported_to_the_launcher(monkeypatch):
  said = []

  class Line:
    def say(self, event, **fields):
      said.append((event, fields))

  monkeypatch.setattr(channel, "current", Line)
  with served.served() as address:
    replica = coordinator.join(
      optax.sgd(0.1),
      jnp.zeros(2),
      coordinator_address=address,
      secret=served.SECRET,
      total_num_replicas=1,
      replica=0,
      start_coordinator=False,
      timeout=3.0,
    )
  # The first gradient may be lost with it.
  train = lambda: [replica.step(jnp.ones(2)) for _ in range(2)]
  with pytest.raises(coordinator.CoordinatorError):
    train()
  replica.close()
  joined, failed = said
  assert joined[0] == "joined"
  assert joined[1]["step"] == 0
  assert failed[0] == "failed"
  assert f"coordinator at {address} is not connected" in failed[1]["reason"]


def test_integers_of_numpy_are_integers():
  steps = coordinator.run_embedded(
    lambda replica: replica.step(jnp.ones(2)).global_step,
    np.int64(1),
    optax.sgd(0.1),
    jnp.zeros(2),
    global_step=np.int64(3),
  )
  assert steps == [4]


def test_samples_are_leased_by_integers_of_numpy():
  def train(replica):
    for _ in replica.batches():
      replica.step(jnp.ones(2))
    return replica.global_step

  data = coordinator.Batches(8, 4)
  steps = coordinator.run_embedded(
    train,
    1,
    optax.sgd(0.1),
    jnp.zeros(2),
    replicas_to_aggregate=np.int64(2),
    max_staleness=np.int64(1),
    data=data,
    timeout=20.0,
  )
  assert steps == [2]
  with pytest.raises(ValueError, match="multiple of it"):
    coordinator.run_embedded(
      train,
      2,
      optax.sgd(0.1),
      jnp.zeros(2),
      replicas_to_aggregate=np.int64(3),
      data=data,
    )


def test_an_interrupt_ends_all_embedded_replicas(request):
  """No other code has a handle to them: they would train on."""
  before = runs.coordinator_threads(timeout=0.0)
  handler = signal.signal(signal.SIGINT, signal.default_int_handler)
  request.addfinalizer(lambda: signal.signal(signal.SIGINT, handler))
  main, end = threading.main_thread().ident, time.monotonic() + 60.0

  def train(replica):
    while time.monotonic() < end:
      replica.step(jnp.ones(2))
      if (replica.replica, replica.global_step) == (0, 3):
        signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.5)  # The others wait for it in their next step.

  with pytest.raises(KeyboardInterrupt):
    coordinator.run_embedded(train, 3, optax.sgd(0.1), jnp.zeros(2), **_PATIENT)
  assert time.monotonic() < end
  assert not runs.coordinator_threads(before, timeout=0.0)


def test_an_early_end_waits_for_all_embedded_replicas(
  monkeypatch,
):
  done, start = threading.Event(), replicas.Replica.start

  def late(replica):
    if replica.replica:
      done.wait(0.5)
    return start(replica)

  def train(replica):
    outcome = replica.step(jnp.ones(2))
    replica.leave()
    done.set()
    return outcome.accepted

  monkeypatch.setattr(replicas.Replica, "start", late)
  accepted = coordinator.run_embedded(
    train, 2, optax.sgd(0.1), jnp.zeros(2), replicas_to_aggregate=1
  )
  assert any(accepted)


def test_gradients_of_any_age_count_without_a_staleness_limit():
  """As in TensorFlow's asynchronous jobs, and as None says of the transform."""
  ahead = threading.Event()

  def train(replica):
    if replica.replica == 1:
      assert ahead.wait(60.0)
      return replica.step(jnp.ones(2))
    outcomes = [replica.step(jnp.ones(2)) for _ in range(5)]
    ahead.set()
    return outcomes[-1]

  _, late = coordinator.run_embedded(
    train,
    2,
    optax.sgd(0.1),
    jnp.zeros(2),
    replicas_to_aggregate=1,
    max_staleness=None,
  )
  assert (late.accepted, late.staleness) == (True, 5)
