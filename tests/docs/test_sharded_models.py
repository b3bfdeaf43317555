"""docs/sharded_models.md trains to the numbers of one device that has it all."""

import contextlib
import io
import pathlib
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

_PAGE = (
  pathlib.Path(__file__).resolve().parents[2] / "docs" / "sharded_models.md"
)


def _by_one(tx, given):
  """Trains the page's model on one device, on the whole batch."""
  params, x, y = jax.device_get((given["params"], given["x"], given["y"]))
  state = tx.init(params)

  def loss(params):
    out = jax.nn.relu(x @ params["in"]) @ params["out"] + params["bias"]
    return jnp.mean((out - y) ** 2)

  @jax.jit
  def step(params, state):
    updates, state = tx.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state

  for _ in range(30):
    params, state = step(params, state)
  return params


@jax.numpy_dtype_promotion("standard")  # As where it is read.
@jax.numpy_rank_promotion("allow")
def test_the_page_trains_as_one_device():
  text = _PAGE.read_text("utf-8")
  blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
  inputs = {"__name__": "__main__"}
  trained = []
  with contextlib.redirect_stdout(io.StringIO()) as out:
    for block in blocks:
      exec(block, inputs)
      if "trained, state" in block:
        trained.append(jax.device_get(inputs["trained"]))
  sync, sharded, plain_jit = trained
  assert inputs["N"] * inputs["M"] == jax.device_count()
  adam = _by_one(optax.adam(3e-2), inputs)
  assert not np.allclose(adam["in"], inputs["params"]["in"], atol=1e-2)
  chex.assert_trees_all_close(sync, adam, rtol=1e-3, atol=1e-4)
  chex.assert_trees_all_close(plain_jit, adam, rtol=1e-3, atol=1e-4)
  clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-2))
  chex.assert_trees_all_close(
    sharded, _by_one(clipped, inputs), rtol=1e-3, atol=1e-4
  )
  # What the page says that it prints.
  assert "P('data', None, 'model')" in out.getvalue()
  assert "P('data', None, 'model') True" in out.getvalue()
