"""`join`, as a user calls it."""

import importlib
import socket

import jax.numpy as jnp
import optax

from optax_dist import coordinator
from optax_dist.coordinator.store import process
from tests.coordinator.transport import worlds

# The package's name for it is the function.
joining = importlib.import_module("optax_dist.coordinator.join")


def _free_port():
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return probe.getsockname()[1]


def test_a_store_that_join_starts_has_the_same_certificates(
  tmp_path, monkeypatch
):
  started, original = [], process.start

  def start(*args, **kwargs):
    started.append(original(*args, **kwargs))
    return started[-1]

  monkeypatch.setattr(process, "start", start)
  monkeypatch.setattr(joining, "_IDLE", 5.0)
  files = worlds.certificates(tmp_path)
  with coordinator.join(
    optax.sgd(0.5),
    jnp.zeros(2),
    coordinator_address=f"localhost:{_free_port()}",
    total_num_replicas=1,
    replica=0,
    certificates=files,
    bind="127.0.0.1",
    timeout=5.0,
    attempt_timeout=2.0,
    leader_timeout=2.0,
  ) as replica:
    assert replica.step(jnp.ones(2)).accepted
  (store,) = started
  store.stop()
