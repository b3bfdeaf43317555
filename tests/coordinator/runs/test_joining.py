"""Ways to join: over IPv6, and where another one listened before."""

import os
import subprocess
import sys
import threading

import jax.numpy as jnp
import optax
import pytest

from optax_dist import coordinator
from optax_dist.coordinator.launch import environment
from optax_dist.coordinator.server import process
from optax_dist.coordinator.transport import addresses

_SECRET = "a secret of enough bytes"
_PARAMS = {"w": jnp.ones(100_000)}


def _train(options):
  """Both make six steps; their fingerprints, and errors."""
  result, errors = {}, []

  def run(number):
    try:
      with coordinator.join(
        optax.sgd(0.1),
        _PARAMS,
        replica=number,
        total_num_replicas=2,
        timeout=60.0,
        transfer_timeout=20.0,
        **options,
      ) as replica:
        while replica.global_step < 6:
          replica.step(_PARAMS)
        replica.finish()
        result[number] = replica.global_step, replica.fingerprint()
    except BaseException as error:
      errors.append(error)

  threads = [threading.Thread(target=run, args=(i,)) for i in (0, 1)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(120.0)
  assert not errors
  assert result[0] == result[1]
  assert result[0][0] == 6


def test_replicas_join_over_ipv6():
  try:
    made = process.start(_SECRET.encode(), bind="::1", port=0)
  except (OSError, RuntimeError) as error:
    pytest.skip(f"no IPv6 here: {error}")
  try:
    address = made.address
    assert address.startswith("[::1]:")
    _train(
      {
        "coordinator_address": address,
        "secret": _SECRET,
        "bind": "::1",
        "start_coordinator": False,
      }
    )
  finally:
    made.stop()


def test_process_may_reuse_the_port_of_a_lost_process():
  """Its name is another one, so it is no process that refuses to be joined."""
  program = (
    "import os, jax.numpy as jnp, optax;"
    "from optax_dist import coordinator;"
    "joined = coordinator.join(optax.sgd(0.1), jnp.zeros(2), replica=0,"
    " total_num_replicas=1, bind='127.0.0.1', ports=os.environ['PORT'],"
    " timeout=60.0, silence_timeout=1.0, transfer_timeout=2.0);"
    "print('at step', joined.global_step, flush=True);"
    "os._exit(0)"  # Without saying goodbye.
  )
  (port,) = addresses.free_ports()
  with process.start(_SECRET.encode(), port=0) as made:
    settings = environment.Environment(
      coordinator_address=made.address, secret=_SECRET
    )
    env = {**os.environ, **settings.variables(), "PORT": str(port)}
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
