"""The averages of Adam and its variants: of the gradients and of their squares."""

from optax_dist.optimizers._internal import (
  complex_numbers,
  hyperparameters,
  row_wise,
)


def averages(slots, grad, beta1, beta2):
  """The next mean and mean square of the gradients."""
  rest1 = hyperparameters.complement(beta1, grad.dtype)
  rest2 = hyperparameters.complement(beta2, grad.dtype)
  m = slots["m"] + (grad - slots["m"]) * rest1
  v = slots["v"] + (complex_numbers.abs_square(grad) - slots["v"]) * rest2
  return m, v


def sparse_averages(slots, slices, beta1, beta2):
  """The same for a sparse gradient: all rows decay, touched ones are added."""
  values = slices.values
  m = row_wise.decay_and_add(slots["m"], beta1, slices, values)
  v = row_wise.decay_and_add(
    slots["v"], beta2, slices, complex_numbers.abs_square(values)
  )
  return m, v
