"""The legacy Keras optimizers by name.

Their rules differ from those of the same name in TensorFlow 1: other defaults,
the learning rate inside SGD's momentum, RMSprop from 0, Adagrad with an
epsilon, Nadam with a scheduled momentum.
"""

import inspect
from collections.abc import Callable
from typing import Any

import optax

from optax_dist._internal import checks
from optax_dist.optimizers.keras import rules as keras_rules

_MAKERS: dict[str, Callable[..., optax.GradientTransformationExtraArgs]] = {
  "SGD": keras_rules.sgd,
  "RMSprop": keras_rules.rmsprop,
  "Adagrad": keras_rules.adagrad,
  "Adam": keras_rules.adam,
  "Nadam": keras_rules.nadam,
  "Adamax": keras_rules.adamax,
}

_BY_LOWER_NAME = {name.lower(): maker for name, maker in _MAKERS.items()}

KERAS_NAMES = tuple(_MAKERS)


def keras(
  name: str, *, frozen_iterations: bool = False, **arguments: Any
) -> optax.GradientTransformationExtraArgs:
  r"""Creates a legacy Keras optimizer ("optimizer_v2", that of Keras 2).

  With :math:`t` the step from 1, :math:`\eta` the learning rate, divided by
  :math:`1 + \text{decay} \cdot (t - 1)` (an argument of all but Nadam):

  - ``SGD(learning_rate=0.01, momentum=0.0, nesterov=False)``:
    :math:`b \leftarrow \mu b - \eta g`, :math:`w \leftarrow w + b`, with
    nesterov :math:`w \leftarrow w + \mu b - \eta g`. Slot ``momentum`` if the
    momentum is not 0. Lazy.
  - ``RMSprop(learning_rate=0.001, rho=0.9, momentum=0.0, epsilon=1e-7,
    centered=False)``: ``rmsprop``'s rule with averages from 0 if the momentum
    is not 0, and lazy; else :math:`w \leftarrow w - \eta g / (\sqrt{s - c^2} +
    \epsilon)`, and of a sparse gradient all averages decay. Slots ``rms``,
    ``momentum``, ``mg`` as they are needed.
  - ``Adagrad(learning_rate=0.001, initial_accumulator_value=0.1,
    epsilon=1e-7)``: :math:`a \leftarrow a + g^2`,
    :math:`w \leftarrow w - \eta g / (\sqrt a + \epsilon)`. Slot
    ``accumulator``. Lazy.
  - ``Adam(learning_rate=0.001, beta_1=0.9, beta_2=0.999, epsilon=1e-7,
    amsgrad=False)``: ``adam``'s rule; with amsgrad the root is that of
    :math:`\hat v \leftarrow \max(\hat v, v)`. Slots ``m``, ``v``, ``vhat``.
    Sparse equals dense.
  - ``Nadam(learning_rate=0.001, beta_1=0.9, beta_2=0.999, epsilon=1e-7,
    schedule_decay=0.004)``: with :math:`\mu_t = \beta_1 (1 - 0.5 \cdot
    0.96^{t \cdot \text{schedule\_decay}})` and :math:`\pi_t = \prod_{i \le t}
    \mu_i`, :math:`w \leftarrow w - \eta ((1 - \mu_t) g / (1 - \pi_t) +
    \mu_{t+1} m / (1 - \pi_t \mu_{t+1})) / (\sqrt{v / (1 - \beta_2^t)} +
    \epsilon)`. Slots ``m``, ``v``. Of a sparse gradient all averages decay.
  - ``Adamax(learning_rate=0.001, beta_1=0.9, beta_2=0.999, epsilon=1e-7)``:
    :math:`m \leftarrow m + (1 - \beta_1) (g - m)`,
    :math:`v \leftarrow \max(\beta_2 v, |g|)`,
    :math:`w \leftarrow w - \eta m / ((1 - \beta_1^t) (v + \epsilon))`. Slots
    ``m``, ``v``. Lazy.

  An epsilon of 0 or ``None`` means 1e-7, as in Keras. Instead of the classes'
  clipping arguments, put ``optax.clip`` or ``optax.clip_by_global_norm`` before them
  in a chain.

  Args:
    name: The class name; case does not matter.
    frozen_iterations: Whether Keras's ``iterations`` stays at 0, as it does in
      RETURNN's wrapper: everything that depends on the step keeps its first
      value. Only a ``learning_rate`` that is a schedule advances.
    **arguments: Arguments of the class. ``learning_rate`` may be a schedule.

  Returns:
    The transformation.

  Raises:
    TypeError: If an argument is not a number where it must be one.
    ValueError: If the name or an argument is unknown, or an argument is out of
      its range.

  Source: ``tf_keras.optimizers.legacy``,
  ``returnn.tf.updater._KerasOptimizerWrapper``.

  Example:
    >>> import jax.numpy as jnp
    >>> optimizer = keras("SGD", learning_rate=0.5, momentum=0.9)
    >>> optimizer.update(jnp.ones(1), optimizer.init(jnp.ones(1)))[0].tolist()
    [-0.5]
  """
  checks.flag("frozen_iterations", frozen_iterations)
  if not isinstance(name, str) or name.lower() not in _BY_LOWER_NAME:
    raise ValueError(f"name must be one of {', '.join(_MAKERS)}, got {name!r}")
  if "arguments" in arguments:
    raise ValueError(
      "optax.inject_hyperparams passes keyword arguments of keras on as one argument."
      f" Inject those of a function: lambda learning_rate: keras({name!r},"
      " learning_rate=learning_rate)"
    )
  known = keras_arguments(name)
  unknown = sorted(set(arguments) - set(known))
  if unknown:
    raise ValueError(
      f"arguments of {name} must be among {', '.join(known)}, got"
      f" {', '.join(unknown)}"
    )
  maker = _BY_LOWER_NAME[name.lower()]
  return maker(**arguments, frozen=frozen_iterations)


def keras_arguments(name: str) -> tuple[str, ...]:
  """Lists the arguments that :func:`keras` takes for a class.

  Args:
    name: The class name; case does not matter.

  Returns:
    Their names.

  Example:
    >>> keras_arguments("adamax")[:5]
    ('learning_rate', 'beta_1', 'beta_2', 'epsilon', 'decay')
  """
  parameters = inspect.signature(_BY_LOWER_NAME[name.lower()]).parameters
  return tuple(key for key in parameters if key != "frozen")
