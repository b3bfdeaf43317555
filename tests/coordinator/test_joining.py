"""`join`, as a user calls it."""

import jax.numpy as jnp
import optax

from optax_dist import coordinator
from optax_dist.coordinator import joining
from optax_dist.coordinator import journal as journals
from optax_dist.coordinator.launch.environment import Environment
from optax_dist.coordinator.store import process
from optax_dist.coordinator.transport import addresses
from tests.coordinator.transport import worlds

# Only where something is wrong does anybody wait so long.
_PATIENT = {"timeout": 120.0, "attempt_timeout": 30.0, "leader_timeout": 10.0}


def test_a_store_that_join_starts_has_the_same_certificates(
  tmp_path, monkeypatch
):
  started, original = [], process.start

  def start(*args, **kwargs):
    started.append(original(*args, **kwargs))
    return started[-1]

  monkeypatch.setattr(process, "start", start)
  monkeypatch.setattr(joining, "_IDLE", 120.0)
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
  (store,) = started
  store.stop()


def test_what_is_not_passed_is_taken_from_the_environment(
  tmp_path, monkeypatch
):
  secret = "a secret of enough bytes"
  (tmp_path / "secret").write_text(secret)
  journal = tmp_path / "journal.jsonl"
  with process.start(secret.encode(), port=0) as store:
    told = Environment(
      coordinator_address=store.address.partition(",")[0],
      secret_file=str(tmp_path / "secret"),
      run="of two",
      num_replicas=2,
      replica=1,
      replicas_to_aggregate=2,
      min_replicas=1,
      journal=str(journal),
      channel=99,
    )
    for name, value in told.variables().items():
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


def test_replicas_listen_at_the_address_that_was_chosen_for_their_host(
  tmp_path, monkeypatch
):
  secret, journal = b"a secret of enough bytes", tmp_path / "journal.jsonl"
  with process.start(secret, port=0) as store:
    made = []
    for number, own in enumerate(("127.0.0.2", "127.0.0.3")):
      told = Environment(local_addr=own, num_replicas=2, replica=number)
      for name, value in told.variables().items():
        monkeypatch.setenv(name, value)
      made.append(
        coordinator.join(
          optax.sgd(0.5),
          jnp.zeros(2),
          # By TCP, as from another host.
          coordinator_address=store.address.partition(",")[0],
          secret=secret,
          journal=journal,
          replicas_to_aggregate=1,
          timeout=20.0,
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
