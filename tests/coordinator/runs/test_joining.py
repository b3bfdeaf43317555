"""Ways to join: IPv6, certificates, etcd; where another one listened before."""

import os
import subprocess
import sys
import threading

import jax.numpy as jnp
import optax
import pytest

from optax_dist import coordinator
from optax_dist.coordinator.launch import environment
from optax_dist.coordinator.store import process as store_process
from optax_dist.coordinator.transport import addresses
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


def test_replicas_join_over_ip_version_6():
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


def test_replicas_join_with_certificates(tmp_path):
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
def test_replicas_join_over_etcd(tmp_path):
  cluster = etcd_cluster.Cluster(tmp_path, 1)
  try:
    _train({"store": cluster.url, "secret": _SECRET})
  finally:
    cluster.close()


def test_a_process_may_listen_where_the_lost_leader_did():
  """Its name is another one, so it is no process that refuses to be joined."""
  program = (
    "import os, jax.numpy as jnp, optax;"
    "from optax_dist import coordinator;"
    "joined = coordinator.join(optax.sgd(0.1), jnp.zeros(2), replica=0,"
    " total_num_replicas=1, bind='127.0.0.1', ports=os.environ['PORT'],"
    " timeout=60.0, leader_timeout=1.0, attempt_timeout=2.0);"
    "print('at step', joined.global_step, flush=True);"
    "os._exit(0)"  # Without saying goodbye.
  )
  (port,) = addresses.free_ports()
  with store_process.start(_SECRET.encode(), port=0) as store:
    told = environment.Environment(
      coordinator_address=store.address.partition(",")[0], secret=_SECRET
    )
    env = {**os.environ, **told.variables(), "PORT": str(port)}
    for _ in range(2):
      ended = subprocess.run(
        [sys.executable, "-c", program],
        env=env,
        capture_output=True,
        text=True,
        timeout=300.0,
      )
      assert (ended.stdout, ended.returncode) == ("at step 0\n", 0), (
        ended.stderr
      )
    assert "another process is at its address" in ended.stderr
