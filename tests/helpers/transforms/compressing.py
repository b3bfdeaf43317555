"""The received value of an array that is sent in fewer bytes."""

import functools

import jax


@functools.cache
def _receiver(method):
  def reduce(x, num_updates):
    state = method.init(x)._replace(num_updates=num_updates)
    return method.reduce(x, state, ("alone",))[0]

  return jax.jit(jax.vmap(reduce, in_axes=(0, None), axis_name="alone"))


def received(method, x, num_updates=0):
  """The update that a single replica receives after some others."""
  return _receiver(method)(x[None], num_updates)[0]
