"""Creates the whole optimizer of a RETURNN configuration."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_dist.optimizers._internal import hyperparameters
from optax_dist.optimizers.returnn import gradients, tensorflow, torch
from optax_dist.optimizers.returnn.options import Options

_BACKENDS = {
  "tensorflow": "tensorflow",
  "tensorflow-net-dict": "tensorflow",
  "torch": "torch",
}
_HOROVOD = (
  "must be off here: put optax_dist.cross_shard(axis) in front of the chain, with"
  ' reduction="sum" unless gradients are averaged, or, if parameters are averaged,'
  " optax_dist.local_sgd around it; with horovod_scale_lr, multiply the learning"
  " rate by the number of replicas"
)
#: Options that change training in RETURNN, but can't be part of a transformation.
_REFUSED = {
  "use_horovod": _HOROVOD,
  "torch_distributed": _HOROVOD,
  "maximize_grad_norm": (
    "must be off here: make it a part of the loss, loss(params) -"
    " maximize_grad_norm * optax.tree.norm(jax.grad(loss)(params))"
  ),
  "global_norm_tag": (
    "must be off here: clip the tagged variables in a transformation of their own,"
    " in optax.partition"
  ),
  "gradient_clip_global_norm_tag": (
    "must be off here: clip the tagged variables in a transformation of their own,"
    " in optax.partition"
  ),
  "extra_updates": "must be off here: call it after optax.apply_updates",
  "reset_updater_vars_mod_step": (
    "must be off here: after so many steps of an epoch, make the state anew with"
    " tx.init(params)"
  ),
}


def from_returnn_config(
  config: Mapping[str, Any] | str,
  learning_rate: hyperparameters.ScalarOrSchedule | None = None,
  *,
  backend: str | None = None,
  l2: Any = None,
  weight_decay_mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
  """Creates the optimizer of a RETURNN configuration, with its changes of gradients.

  The order and the numbers are RETURNN's. With TensorFlow it sums gradients, adds
  noise, clips numbers, then norms of variables, then by the global norm, replaces
  what is not finite and drops what is too large; with PyTorch it sums, adds noise
  and clips. An option of 0, ``None`` or ``False`` is off. On several replicas,
  put :func:`~optax_dist.cross_shard` in front.

  With TensorFlow, class names are those of RETURNN's, TensorFlow 1's or Keras's
  classes, case-insensitively and with or without a final ``Optimizer``. RETURNN's
  classes take precedence over TensorFlow's, and those over Keras's, of which
  ``"sgd"``, ``"adamax"`` and ``"NadamKeras"`` are left. A class with an
  ``epsilon`` gets RETURNN's default, 1e-16. Keras's ``iterations`` never advance,
  and its clipping arguments have no effect, as in RETURNN's wrapper.

  Args:
    config: The configuration: a mapping of options by name, of which these are
      read: ``optimizer`` or what older versions read instead (``adam``,
      ``nadam``, ``adadelta``, ``adagrad``, ``rmsprop``, ``momentum``),
      ``optimizer_epsilon``, ``momentum``, ``learning_rate``,
      ``dynamic_learning_rate``, ``accum_grad_multiple_step``,
      ``gradient_noise``, ``random_seed``, ``gradient_clip``,
      ``gradient_clip_norm``, ``gradient_clip_avg_norm``,
      ``gradient_clip_global_norm``, ``gradient_nan_inf_filter``,
      ``grad_norm_to_clip_to_zero``, ``decouple_constraints``, ``backend``. Or
      only the value of ``optimizer``: ``{"class": name}`` with arguments of the
      class (``learning_rate_multiplier`` scales the learning rate), or the name.
    learning_rate: The learning rate: a number, a scalar array, or a schedule of
      RETURNN's ``global_train_step``, which counts gradients from 0. None for the
      configuration's, if that is one number.
      ``dynamic_learning_rate`` is applied to it.
    backend: ``"tensorflow"`` or ``"torch"``; None for the configuration's, which
      is ``"tensorflow"`` if it has none.
    l2: With ``decouple_constraints``, the L2 of each parameter: a tree that is a
      prefix of the parameters, with 0 or None for none, or one number for all.
    weight_decay_mask: With PyTorch and a ``weight_decay``, which parameters RETURNN
      decays: a tree of booleans, a function of the parameters, or True for all.

  Returns:
    The transformation.

  Raises:
    ValueError: If ``config`` is neither a name nor a mapping, names no optimizer,
      has a class, argument or backend that is unknown or an option out of its
      range, changes training in a way that a transformation can't, or if
      the learning rate or ``l2`` is missing.

  Source: ``returnn.tf.updater.Updater`` and ``returnn.torch.updater.Updater``.

  Example:
    >>> import jax.numpy as jnp
    >>> tx = from_returnn_config({
    ...   "optimizer": {"class": "momentum", "momentum": 0.9},
    ...   "learning_rate": 0.5, "gradient_clip": 1, "gradient_noise": 0})
    >>> tx.update(jnp.array([3.0]), tx.init(jnp.ones(1)))[0].tolist()
    [-0.5]
  """
  options = Options(_as_options(config))
  backend = _backend(backend or options.get("backend", "tensorflow"))
  for name, reason in _REFUSED.items():
    if options.is_on(name):
      raise ValueError(f"{name} {reason}. Got {options.get(name)!r}")
  layer = next(_layers_with_options(options.get("network")), None)
  if layer is not None:
    raise ValueError(
      f"the layer {layer!r} has updater_opts of its own: leave `network` out of the"
      " configuration, and give its variables a transformation of their own in"
      " optax.partition"
    )
  rate = _learning_rate(options, learning_rate, backend)
  arguments = _optimizer(options, backend)
  if backend == "torch":
    if l2 is not None:
      raise ValueError(
        "l2 must be None with the torch backend: see weight_decay"
      )
    tx = torch.optimizer(arguments, rate, weight_decay_mask)
    return torch.before(tx, options)
  if weight_decay_mask is not None:
    raise ValueError("weight_decay_mask is of the torch backend: see l2")
  tx = tensorflow.optimizer(arguments, rate, options)
  if options.flag("decouple_constraints"):
    if l2 is None:
      raise ValueError(
        "l2 must be given with decouple_constraints: a tree with the L2 of the layer"
        " of each parameter, 0 for none"
      )
    tx = gradients.decayed_before(tx, l2)
  elif l2 is not None:
    raise ValueError(
      "l2 must be None without decouple_constraints: L2 is a part of the loss then,"
      " l2 * sum(w ** 2)"
    )
  return gradients.before(tx, options)


def _as_options(config: Any) -> Mapping[str, Any]:
  """A configuration of the value of `optimizer`, or of all options."""
  if isinstance(config, str):
    config = {"class": config}
  if not isinstance(config, Mapping):
    raise ValueError(
      "config must be the options of a configuration, or the name of a class, or a"
      f" mapping with a 'class' and its arguments, got {config!r}"
    )
  # A file can't have an option of this name, which is a keyword of Python.
  return {"optimizer": config} if "class" in config else config


def _backend(name: Any) -> str:
  if name == "jax":
    raise ValueError(
      "RETURNN's jax backend calls optax itself: write optax.adamw, optax.adam or"
      " optax.sgd with the arguments of `optimizer`, and a mask that leaves biases out"
      " of weight decay, after optax.clip_by_global_norm(gradient_clip_global_norm)"
      " unless that is 0"
    )
  if name not in _BACKENDS:
    raise ValueError(
      f"backend must be one of {', '.join(_BACKENDS)}, got {name!r}"
    )
  return _BACKENDS[name]


def _optimizer(options: Options, backend: str) -> Mapping[str, Any]:
  """The class of the optimizer, with its arguments."""
  arguments = options.get("optimizer")
  if isinstance(arguments, str):
    arguments = {"class": arguments}
  if not arguments and backend == "tensorflow":
    arguments = tensorflow.by_old_names(options)
  if not isinstance(arguments, Mapping) or "class" not in arguments:
    raise ValueError(
      "config must have an 'optimizer' with a 'class', one of"
      f" {tensorflow.returnn_class_names()} with TensorFlow, got {arguments!r}."
      ' Without one, RETURNN takes {"class": "GradientDescent"}'
    )
  for name in ("learning_rate", "lr"):
    if name in arguments:
      raise ValueError(
        f"learning_rate must be an argument, not part of {arguments}, as in RETURNN"
      )
  if "param_groups_custom" in arguments:
    raise ValueError(
      "param_groups_custom must be left out: give each group a transformation of"
      " its own in optax.partition"
    )
  for name in (
    "weight_decay_modules_blacklist",
    "weight_decay_custom_include_check",
  ):
    # The argument weight_decay_mask takes the place of these options.
    arguments = {key: x for key, x in arguments.items() if key != name}
  return arguments


def _layers_with_options(network: Any, name: str = "") -> Iterator[str]:
  """The names of layers with options of their own for updates."""
  if not isinstance(network, Mapping):
    return
  for key, layer in network.items():
    if key == "updater_opts" and layer:
      yield name
    yield from _layers_with_options(layer, key)


def _learning_rate(
  options: Options, given: Any, backend: str
) -> hyperparameters.ScalarOrSchedule:
  """The learning rate of each step of the optimizer."""
  rate = given
  if rate is None:
    control = options.get("learning_rate_control", "constant")
    if options.is_on("learning_rates") or control != "constant":
      raise ValueError(
        "learning_rate must be given, since it changes from epoch to epoch:"
        " returnn_learning_rates(config, scores) computes RETURNN's"
      )
    if "learning_rate" not in options:
      raise ValueError(
        "learning_rate must be given, as an argument or in the configuration"
      )
    rate = options.number("learning_rate")
  hyperparameters.check_learning_rate(rate)
  factor = options.get("dynamic_learning_rate")
  steps = gradients.accumulated_steps(options)
  if not factor:
    if steps == 1 or not callable(rate):
      return rate
    return lambda count: rate(count * steps + steps - 1)
  dynamic = _dynamic(factor, backend)

  def schedule(count):
    step = count * steps + steps - 1
    return dynamic(step, rate(step) if callable(rate) else jnp.asarray(rate))

  return schedule


def _dynamic(value: Any, backend: str) -> Any:
  """``dynamic_learning_rate`` as a function of the step and of the rate."""
  if isinstance(value, Mapping):
    if backend != "tensorflow" or set(value) != {"interval", "decay"}:
      raise ValueError(
        "dynamic_learning_rate must be a function, or with TensorFlow a mapping with"
        f" interval and decay, got {value!r}"
      )
    interval, decay = value["interval"], value["decay"]

    def cyclic(step, rate):
      return rate * jnp.float32(decay) ** jnp.float32(step % interval)

    return cyclic
  if not callable(value):
    raise ValueError(
      f"dynamic_learning_rate must be a function or a mapping, got {value!r}"
    )
  parameters = inspect.signature(value).parameters
  if all(p.kind != p.VAR_KEYWORD for p in parameters.values()):
    raise ValueError(
      "dynamic_learning_rate must take **kwargs, as RETURNN demands"
    )
  missing = {"epoch", "epoch_continuous"} & set(parameters)
  if missing:
    raise ValueError(
      f"dynamic_learning_rate must not need {', '.join(sorted(missing))}, which an"
      " optimizer doesn't know: pass a schedule of the step as `learning_rate`"
    )
  if backend == "torch" and "network" in parameters:
    raise ValueError(
      "dynamic_learning_rate must not need a network with the torch backend, as"
      " in RETURNN"
    )

  def dynamic(step, rate):
    network = {"network": _Network(step)} if backend == "tensorflow" else {}
    try:
      return value(global_train_step=step, learning_rate=rate, **network)
    except jax.errors.ConcretizationTypeError as error:
      raise ValueError(
        "dynamic_learning_rate must compute with jax.numpy, on a step that isn't"
        " known while it is compiled: jnp.where(...) for `if`"
      ) from error

  return dynamic


class _Network:
  """A stand-in for RETURNN's network, for ``dynamic_learning_rate``: has the step."""

  def __init__(self, step: Any):
    self.global_train_step = step

  def __getattr__(self, name: str) -> Any:
    raise ValueError(
      f"dynamic_learning_rate must not read {name} of the network, which isn't here"
    )
