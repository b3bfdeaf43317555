"""Replicas on the 8 devices that tests have."""

import jax
import pytest

from optax_dist.cli import devices, errors


@pytest.mark.parametrize(
  ("replicas", "batch_size", "size"),
  [(None, 64, 8), (None, 20, 5), (None, 7, 7), (None, 1, 1), (2, 64, 2)],
)
def test_replicas_are_as_asked_or_as_many_as_divide_the_batch(
  replicas, batch_size, size
):
  mesh = devices.replica_mesh(replicas, batch_size, "data")
  assert dict(mesh.shape) == {"data": size}


def test_more_replicas_than_devices_are_refused():
  with pytest.raises(errors.CommandError, match="more than the 8 cpu") as info:
    devices.replica_mesh(16, 64, "data")
  assert info.value.exit_code == 2


@pytest.mark.parametrize(
  ("error", "said"),
  [
    (RuntimeError("out of luck"), "no devices here: out of luck"),
    (AssertionError(), "no such platform"),
  ],
)
def test_no_devices_are_a_command_error(monkeypatch, error, said):
  def fail():
    raise error

  monkeypatch.setattr(jax, "devices", fail)
  with pytest.raises(errors.CommandError, match=f"{said}.*JAX_PLATFORMS is"):
    devices.replica_mesh(None, 64, "data")
