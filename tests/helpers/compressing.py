"""What is received of an array that is sent in fewer bytes."""

import jax


def received(method, x, num_updates=0):
  """What a single replica gets of an update, after some others."""

  def reduce(x):
    state = method.init(x)._replace(num_updates=num_updates)
    return method.reduce(x, state, ("alone",))[0]

  return jax.vmap(reduce, axis_name="alone")(x[None])[0]
