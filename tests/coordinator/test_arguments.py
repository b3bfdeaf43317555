"""A wrong argument is refused at once and by name, before anybody is called."""

import dataclasses
import inspect

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_dist import coordinator
from optax_dist.coordinator import checkpoint, options

# Values that no argument of these accepts.
WRONG = [object(), np.arange(2.0), 1j, {1: 2}, float("nan"), lambda: None]
# Any tree may be a state, and any shape of it; and these have tests of their own.
_OWN = {"opt", "params", "opt_state", "inner_state", "settings", "config"}
NAMES = [*inspect.signature(coordinator.join).parameters]
NAMES += [field.name for field in dataclasses.fields(options.Options)]
NAMES = [name for name in NAMES if name not in _OWN]


def join(**arguments):
  known = {"total_num_replicas": 1, "replica": 0, "start_coordinator": False}
  coordinator.join(
    optax.sgd(0.1),
    jnp.zeros(2),
    **{"coordinator_address": "127.0.0.1:1", **known, **arguments},
  )


@pytest.mark.parametrize("value", WRONG)
@pytest.mark.parametrize("name", NAMES)
def test_join_refuses_a_wrong_argument_by_name(name, value):
  with pytest.raises((TypeError, ValueError), match=rf"(?i)\b{name}\b") as said:
    join(**{name: value})
  assert len(str(said.value)) < 600


@pytest.mark.parametrize("value", WRONG)
@pytest.mark.parametrize("name", NAMES)
def test_as_optimizer_refuses_a_wrong_argument_by_name(name, value):
  with pytest.raises((TypeError, ValueError), match=rf"(?i)\b{name}\b"):
    coordinator.as_optimizer(optax.sgd(0.1), total_steps=3, **{name: value})


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("coordinator_address", 29300),
    ("secret", 3),
    ("secret", "short"),
    ("start_coordinator", "yes"),
    ("certificates", "me.pem:me.key:ca.pem"),
    ("bind", 0),
    ("on_sigterm", "stay"),
    ("ports", "29400-29300"),
    ("replicas_to_aggregate", "2"),
    ("lower_on_loss", "no"),
    ("lineage", 0),
    ("staleness_weight", ""),
    ("strategy", ()),
    ("strategy", "elastic"),
    ("strategy", coordinator.elastic_average),
    ("data", 3),
    ("progress", 3),
    ("replica", 1),
    ("replica", -1),
    ("replica", "a"),
    ("total_num_replicas", 1.0),
    ("global_step", -1),
    ("global_step", 1.5),
    ("lower_on_leave", "no"),
    ("staleness_weight", "linear"),
    ("replicas_to_aggregate", 0),
    ("replicas_to_aggregate", 2**31),
    ("max_staleness", 2**64),
    ("global_step", 2**64),
    ("fingerprint_every", 2**64),
    ("max_skipped", 2**64),
    ("inline_bytes", 2**64),
  ],
)
def test_join_refuses_plausible_but_invalid_values(name, value):
  with pytest.raises((TypeError, ValueError), match=rf"(?i)\b{name}\b"):
    join(**{name: value})


@pytest.mark.parametrize("value", [3, None, "train", object()])
def test_run_embedded_needs_a_function(value):
  with pytest.raises(ValueError, match=r"`fn` must be a function"):
    coordinator.run_embedded(value, 1, optax.sgd(0.1), jnp.zeros(2))


@pytest.mark.parametrize("value", [29300, None, b"x", "", 1.5, object()])
def test_checkpoint_and_replica_calls_refuse_a_wrong_argument_by_name(
  value, tmp_path
):
  def train(replica):
    outcome = replica.step(jnp.ones(2))
    like = {"params": jnp.zeros(2), "opt_state": ()}
    calls = {
      "path": [
        lambda: checkpoint.save(value, replica),
        lambda: checkpoint.restore(value, **like),
      ],
      "folder": [
        lambda: checkpoint.save_if_due(value, replica, outcome, every=1),
        lambda: checkpoint.latest(value),
        lambda: checkpoint.resume(value, **like),
      ],
      "replica": [
        lambda: checkpoint.save(tmp_path / "one", value),
        lambda: checkpoint.save_if_due(tmp_path, value, outcome, every=1),
      ],
      "outcome": [
        lambda: checkpoint.save_if_due(tmp_path, replica, value, every=1)
      ],
      "reason": [] if value == "" else [lambda: replica.finish(value)],
    }
    for name, those in calls.items():
      for call in those:
        with pytest.raises(ValueError, match=f"`{name}` must be"):
          call()
    saved = tmp_path / "good"
    checkpoint.save(saved, replica)
    with pytest.raises(ValueError, match="another model or optimizer: params"):
      checkpoint.restore(saved, value, ())

  coordinator.run_embedded(train, 1, optax.sgd(0.1), jnp.zeros(2))


def test_empty_optimizer_state_may_have_any_containers():
  """A library may restore them without knowing the optimizer."""
  for opt_state in ([], {}, ()):
    (params,) = coordinator.run_embedded(
      lambda replica: replica.step(jnp.ones(2)) and replica.params,
      1,
      optax.sgd(0.5),
      jnp.zeros(2),
      opt_state=opt_state,
    )
    np.testing.assert_array_equal(params, -0.5)
