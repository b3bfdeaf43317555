"""Update rules in float64, against their formulas in NumPy.

The recordings of the originals are float32: they don't show whether a rule that
trains float64 parameters rounds to float32 on its way. All hyperparameters given
here should be float32 numbers, such as 0.75, to which the rules round them.
"""

import jax
import jax.numpy as jnp
import numpy as np

from optax_dist.sparse import IndexedSlices, apply_updates

_STEPS = 7
_ROWS = 5
_SLOTS = 4
_RATES = 2.0 ** -np.array([3.0, 1.0, 4.0, 2.0, 5.0, 3.0, 1.0])

#: A number and a schedule, each a learning rate, with its values by step.
RATES = {
  "number": (0.125, np.full(_STEPS, 0.125)),
  "schedule": (lambda count: jnp.asarray(_RATES)[count], _RATES),
}


def _gradients():
  """Gradients of each step, of large and of small numbers.

  One element is always zero, and all are in the fourth step. The sparse ones
  have repeated rows, and slots that are not used.
  """
  rng = np.random.default_rng(0)
  scale = 10.0 ** rng.integers(-2, 2, size=(_STEPS, 1, 1))
  dense = scale * rng.normal(size=(_STEPS, 4, 3))
  dense[:, 0, 0] = 0.0
  dense[3] = 0.0
  values = rng.normal(size=(_STEPS, _SLOTS, 2))
  indices = rng.integers(0, _ROWS, size=(_STEPS, _SLOTS)).astype(np.int32)
  indices[2, :3] = 1
  indices[1:3, 3] = _ROWS
  values[indices == _ROWS] = 0.0
  return dense, values, indices


def _start():
  rng = np.random.default_rng(1)
  return {"dense": rng.normal(size=(4, 3)), "table": rng.normal(size=(5, 2))}


def _trajectory(optimizer):
  """Returns the parameters after each step, with a leading axis of steps."""
  dense, values, indices = _gradients()
  slices = IndexedSlices.unchecked(values, indices, (_ROWS, 2))

  def step(carry, gradients):
    params, state = carry
    updates, state = optimizer.update(gradients, state, params)
    params = apply_updates(params, updates)
    return (params, state), params

  @jax.jit
  def run(params, gradients):
    carry = params, optimizer.init(params)
    return jax.lax.scan(step, carry, gradients)[1]

  return run(_start(), {"dense": dense, "table": slices})


def _expected(formula, slots, rates, sparse):
  """Returns the same by a formula.

  Args:
    formula: takes a parameter, its gradient, its slots by name, the step from 1
      and the learning rate; changes the slots and returns the new parameter.
    slots: initial values of the slots by name.
    rates: the learning rate of each step.
    sparse: what a sparse gradient, with repeated rows summed, changes: "lazy" if
      only the rows that it has and their slots, "moves" if only these rows but
      the slots of all, "dense" if all; None if it is not compared.
  """
  params = _start()
  of = {
    name: {slot: np.full_like(x, value) for slot, value in slots.items()}
    for name, x in params.items()
  }
  results = {name: [] for name in params}
  for t, (dense, values, indices) in enumerate(
    zip(*_gradients(), strict=True), start=1
  ):
    params["dense"] = formula(
      params["dense"], dense, of["dense"], t, rates[t - 1]
    )
    total = np.zeros((_ROWS + 1, 2))
    np.add.at(total, indices, values)
    old, old_slots = params["table"], dict(of["table"])
    new = formula(old, total[:-1], of["table"], t, rates[t - 1])
    touched = np.isin(np.arange(_ROWS), indices)[:, None]
    if sparse != "dense":
      new = np.where(touched, new, old)
    if sparse == "lazy":
      of["table"] = {
        slot: np.where(touched, x, old_slots[slot])
        for slot, x in of["table"].items()
      }
    params["table"] = new
    for name, x in params.items():
      results[name].append(x)
  return {name: np.stack(xs) for name, xs in results.items()}


def check(make, formula, slots=None, *, rate, sparse, rtol=1e-11):
  """Checks a rule against its formula in float64.

  Args:
    make: creates the optimizer from a learning rate.
    formula: its formula, see :func:`_expected`.
    slots: initial values of its slots by name.
    rate: a key of ``RATES``.
    sparse: see :func:`_expected`.
    rtol: how close each number must be.
  """
  inputs, values = RATES[rate]
  with jax.enable_x64(True):
    got = _trajectory(make(inputs))
  want = _expected(formula, slots or {}, values, sparse)
  for name in ["dense", "table"] if sparse else ["dense"]:
    assert got[name].dtype == np.float64
    np.testing.assert_allclose(
      got[name], want[name], rtol=rtol, atol=1e-13, err_msg=name
    )
