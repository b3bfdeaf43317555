"""A replica that differs is told in what."""

import embedded_runs as runs
import jax.numpy as jnp
import optax

from optax_dist.coordinator import policies, specs

_SGD = optax.sgd(0.1)


def test_specs_tell_what_differs():
  def spec(opt=_SGD, params=runs.PARAMS, k=2, wire="float32"):
    policy = policies.SyncReplicas(opt, policies.Quorum(k, 2))
    return specs.spec(policy, policy.shared(params), params, wire)

  ours = spec()
  assert specs.difference(ours, spec()) == ""
  for name, other in {
    "parameters": spec(params={"b": jnp.zeros(3), "w": jnp.ones((5, 30))}),
    "policy": spec(k=1),
    "optimizer state": spec(opt=optax.sgd(0.1, momentum=0.9)),
    "optimizer": spec(opt=optax.sgd(0.2)),
    "wire": spec(wire="int8"),
  }.items():
    assert specs.difference(ours, other).startswith(f"its {name} differ")
  assert specs.difference(ours, None).startswith("its parameters differ")
