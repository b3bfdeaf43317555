"""Fits a Bayesian regression with NumPyro's SVI, with the coordinator behind it.

  optax-dist launch --replicas 3 --replicas-to-aggregate 2 --output runs/numpyro \
      examples/any_trainer_numpyro.py --steps 400

Each replica sees data of its own, and draws its own samples of the guide. Kill any
of the processes: the others go on, and it comes back. Needs numpyro.
"""

import argparse
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

from optax_dist import coordinator

WEIGHTS = np.array([1.0, -2.0, 0.5], np.float32)


def model(x, y):
  w = numpyro.sample("w", dist.Normal(0, 3).expand([3]).to_event(1))
  with numpyro.plate("points", len(y)):
    numpyro.sample("y", dist.Normal(x @ w, 0.1), obs=y)


def batches(pause, size=32):
  rng = np.random.default_rng(os.getpid())
  while True:
    time.sleep(pause)
    x = rng.normal(size=(size, 3)).astype(np.float32)
    yield x, x @ WEIGHTS + 0.1 * rng.normal(size=size).astype(np.float32)


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("--steps", type=int, default=400)
  parser.add_argument(
    "--pause", type=float, default=0.0, help="as if steps took that much longer"
  )
  args = parser.parse_args()

  schedule = optax.cosine_decay_schedule(3e-2, args.steps)
  k_of_n = coordinator.as_optimizer(
    optax.adam(schedule), total_steps=args.steps
  )
  svi = SVI(model, AutoNormal(model), k_of_n.tx, Trace_ELBO())
  # All replicas start with the same parameters.
  state = svi.init(jax.random.key(0), jnp.zeros((1, 3)), jnp.zeros(1))
  state = state._replace(rng_key=jax.random.key(os.getpid()))
  update = jax.jit(svi.update)
  print(f"process {os.getpid()} starts")
  for batch in k_of_n.until_finished(batches(args.pause)):
    state, value = update(state, *batch)

  params = svi.get_params(state)
  mine = coordinator.fingerprint(svi.optim.get_params(state.optim_state))
  print(
    f"ends at step {k_of_n.replica.global_step}, {mine}, loss {value:.3f},"
    f" w {np.round(params['w_auto_loc'], 2)}"
  )
  assert mine == coordinator.fingerprint(k_of_n.replica.params)


if __name__ == "__main__":
  main()
