"""Ways to join: IPv6, certificates, etcd."""

import threading

import jax.numpy as jnp
import optax
import pytest

from optax_dist import coordinator
from optax_dist.coordinator.store import process as store_process
from tests.coordinator.store import etcd_cluster
from tests.coordinator.transport import worlds

_SECRET = "a secret of enough bytes"
_PARAMS = {"w": jnp.ones(100_000)}


def _train(options):
  """Both make six steps; their fingerprints, and errors."""
  found, errors = {}, []

  def run(number):
    try:
      with coordinator.join(
        optax.sgd(0.1),
        _PARAMS,
        replica=number,
        total_num_replicas=2,
        timeout=60.0,
        attempt_timeout=20.0,
        **options,
      ) as replica:
        while replica.global_step < 6:
          replica.step(_PARAMS)
        replica.finish()
        found[number] = replica.global_step, replica.fingerprint()
    except BaseException as error:
      errors.append(error)

  threads = [threading.Thread(target=run, args=(i,)) for i in (0, 1)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(120.0)
  assert not errors
  assert found[0] == found[1]
  assert found[0][0] == 6


def test_over_ip_version_6():
  try:
    store = store_process.start(_SECRET.encode(), bind="::1", port=0)
  except (OSError, RuntimeError) as error:
    pytest.skip(f"no IPv6 here: {error}")
  try:
    address = store.address.partition(",")[0]
    assert address.startswith("[::1]:")
    _train(
      {
        "coordinator_address": address,
        "secret": _SECRET,
        "bind": "::1",
        "start_store": False,
      }
    )
  finally:
    store.stop()


def test_with_certificates(tmp_path):
  made = worlds.certificates(tmp_path)
  with store_process.start(
    _SECRET.encode(), port=0, certificates=made
  ) as store:
    _train(
      {
        "coordinator_address": store.address.partition(",")[0],
        "secret": _SECRET,
        "certificates": made,
        "bind": "127.0.0.1",
        "start_store": False,
      }
    )


@etcd_cluster.needs_etcd
def test_with_etcd(tmp_path):
  cluster = etcd_cluster.Cluster(tmp_path)
  try:
    _train({"store": cluster.url, "secret": _SECRET})
  finally:
    cluster.close()
