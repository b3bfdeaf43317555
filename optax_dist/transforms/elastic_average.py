"""Elastic averaging: replicas that explore, tied to a center."""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_dist._internal import axes, checks, replica_params
from optax_dist._internal.indexed_slices import as_dense
from optax_dist._internal.leaves import precision
from optax_dist._internal.leaves.precision import cast_like
from optax_dist._internal.placement.replica_blocks import PerReplica
from optax_dist._internal.replica_params import Leaves, Trainers
from optax_dist._internal.replicas import Replica
from optax_dist.compression.interface import (
  Compression,
  CompressionState,
  aggregate,
  check_compression,
)

_NAME = "elastic_average"
_EXCHANGES = ("after_step", "same_point")


class ElasticReplica(NamedTuple):
  """State of one replica of :func:`elastic_average`.

  Attributes:
    local_step: steps that the replica has taken (int32 scalar).
    local_center: the center as the replica last saw it.
    inner_state: state of the inner transformation.
    dropped_nonfinite: exchanges that the replica did not take part in because
      its parameters were not finite (int32 scalar).
  """

  local_step: jax.Array
  local_center: Any
  inner_state: Any
  dropped_nonfinite: jax.Array


class ElasticAverageState(NamedTuple):
  """State of :func:`elastic_average`.

  Attributes:
    global_step: exchanges so far (int32 scalar, equal on all replicas).
    iterations: steps since the last exchange (int32 scalar, equal on all).
    center: the center, equal on all replicas. See
      :func:`optax_dist.center_params`.
    replica: one :class:`ElasticReplica` per replica.
  """

  global_step: jax.Array
  iterations: jax.Array
  center: Any
  replica: PerReplica


def elastic_average(
  inner: optax.GradientTransformation,
  axis_name: axes.AxisNames,
  *,
  num_replicas: int | None = None,
  communication_period: int = 10,
  moving_rate: Any = None,
  rho: Any = None,
  learning_rate: Any = None,
  exchange: Literal["after_step", "same_point"] = "after_step",
  reject_nonfinite: bool = True,
  center_dtype: Any = None,
  model_axes: axes.AxisNames | None = None,
  compression: Compression | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Lets each replica train its own parameters, tied to a common center.

  All replicas call ``update`` in lockstep, each with its own parameters and its
  own gradient. On each replica, in TensorFlow's order:

  1. The pull towards the center as this replica last saw it is added to the
     gradient: ``gradient + rho * (params - local_center)``.
  2. ``inner`` updates the replica's parameters; its local step is incremented.
  3. Every ``communication_period`` steps there is an exchange: ``local_center``
     becomes the center, and parameters and center move towards each other: with
     ``pull = moving_rate * (params - center)``, the parameters by ``-pull`` and the
     center by the sum of all replicas' pulls. This sum is the only communication.
     The global step is incremented.

  The move is part of the returned updates, so ``optax.apply_updates`` gives the
  parameters above. A parameter whose gradient is None does not take part.

  The parameters are per replica: give them a leading replica axis outside of
  the map, and shard it. Some of the state is per replica too; pass it in and
  out of the map with :func:`optax_dist.states.state_specs` (or
  :func:`optax_dist.states.state_axes`). Evaluate and save the center:
  :func:`optax_dist.center_params`.

  Args:
    inner: the transformation that updates each replica's parameters.
    axis_name: the axis, or a sequence of axes, over the replicas.
    num_replicas: the number of replicas; None for the size of the axis. It is
      required if ``init`` is called outside of the map and of ``jax.set_mesh``.
    communication_period: steps from one exchange to the next; a positive
      integer.
    moving_rate: the fraction of the distance by which a replica moves in an
      exchange, and by which it moves the center: a number or scalar array, not
      negative. None for ``0.9 / communication_period / num_replicas``.
    rho: strength of the pull between exchanges: a number or scalar array, not
      negative. None for ``moving_rate / learning_rate`` (0 with
      ``"same_point"``, where the exchange is the pull).
    learning_rate: the inner learning rate, for ``rho``: a positive number, a
      scalar array, or a schedule, called with the replica's local step; required
      unless ``rho`` is given. While it is 0, so is ``rho``. For one that changes
      otherwise, put ``optax.inject_hyperparams`` around a function that makes both
      ``inner`` and this transformation.
    exchange: where the distance to the center is measured in an exchange:
      ``"after_step"``, as in TensorFlow, or at the ``"same_point"`` as the
      gradient, before the step, as in the paper's synchronous form.
    reject_nonfinite: whether a replica with an infinite or NaN parameter is
      excluded from exchanges, and counted in its state. If not, it makes the
      center non-finite. Its own parameters are unchanged: see
      :func:`optax_dist.states.reset_to_center`, and wrap ``inner`` in
      ``optax.apply_if_finite`` to drop such gradients at once.
    center_dtype: dtype of the center and of the exchange; None for each
      parameter's own, or float32 if that is narrower.
    model_axes: further axes over which each replica's parameters are sharded:
      all shards of a replica make the same decision. Under ``check_vma=True``
      the types show them; otherwise, if the mesh has further axes, they are
      required: ``()`` for none.
    compression: ``quantize`` or ``top_k`` of :mod:`optax_dist.compression`, with error
      feedback, to send pulls in fewer bytes; None for no compression. What is not
      sent of a pull stays in the replica's parameters, and so in its next pull: no
      residual is kept, and the decay of the error feedback has no effect.

  Returns:
    A :class:`optax.GradientTransformationExtraArgs` with an
    :class:`ElasticAverageState`. Keyword arguments of ``update`` are passed to
    ``inner``. ``init`` takes the parameters without a replica axis. Outside of
    the map all replicas start from them; inside, the center starts from the
    first replica's.

  Raises:
    ValueError: at construction, if an argument is invalid or the learning rate
      unknown; in ``init``, if the number of replicas is; in ``update``, if the
      axis has another size, there are no parameters, or by their type they are
      not each replica's own, or the state was not passed as one replica's.
    TypeError: at construction, if ``compression`` is not a method; in ``update``, if
      an update is not floating-point or complex.
    UnboundAxisError: in ``update``, if an axis is not bound.

  Example:
    >>> import jax, jax.numpy as jnp, optax, optax_dist
    >>> tx = optax_dist.elastic_average(
    ...   optax.sgd(1.0), "data", num_replicas=2, communication_period=1,
    ...   moving_rate=0.25, rho=0.0,
    ... )
    >>> state = tx.init(jnp.zeros(()))
    >>> axes = optax_dist.states.state_axes(state)
    >>> def step(params, state, gradient):
    ...   updates, state = tx.update(gradient, state, params)
    ...   return optax.apply_updates(params, updates), state
    >>> step = jax.vmap(
    ...   step, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name="data"
    ... )
    >>> params, state = step(jnp.zeros(2), state, jnp.array([-4.0, -8.0]))
    >>> params, optax_dist.center_params(state)
    (Array([3., 6.], dtype=float32), Array(3., dtype=float32))

  References:
    Zhang, Choromanska and LeCun 2015, `Deep learning with Elastic Averaging SGD
    <https://arxiv.org/abs/1412.6651>`_; TensorFlow 1,
    ``tf.contrib.opt.ElasticAverageOptimizer``.
  """
  trainers = Trainers.of(
    _NAME, inner, axis_name, num_replicas, center_dtype, model_axes
  )
  period = checks.count("communication_period", communication_period)
  for name, value in (("moving_rate", moving_rate), ("rho", rho)):
    if value is not None:
      checks.rate(name, value)
  if learning_rate is not None:
    checks.rate_or_schedule("learning_rate", learning_rate, positive=True)
  checks.flag("reject_nonfinite", reject_nonfinite)
  checks.one_of("exchange", exchange, _EXCHANGES)
  if rho is None and exchange == "same_point":
    rho = 0.0
  if rho is None and learning_rate is None:
    raise ValueError(
      f"{_NAME}: `rho` is moving_rate / learning_rate: give `learning_rate`, or"
      " `rho`."
    )
  check_compression(_NAME, compression)
  _check_sent(compression)
  elastic = _Elastic(
    trainers,
    period,
    moving_rate,
    rho,
    learning_rate,
    exchange,
    reject_nonfinite,
    compression,
  )
  return optax.GradientTransformationExtraArgs(elastic.init, elastic.update)


@dataclasses.dataclass(frozen=True)
class _Elastic:
  """The rule of :func:`elastic_average`, whose arguments are its attributes."""

  trainers: Trainers
  period: int
  moving_rate: Any
  rho: Any
  learning_rate: Any
  exchange: str
  reject_nonfinite: bool
  compression: Compression | None

  def init(self, params: optax.Params) -> ElasticAverageState:
    size, center, inner_state = self.trainers.init(params)
    # Separate arrays, so that the state can be donated.
    zero = lambda: jnp.zeros([], jnp.int32)
    own = ElasticReplica(zero(), center, inner_state, zero())
    return ElasticAverageState(
      zero(), zero(), center, self.trainers.replicas.start(own, size)
    )

  def update(
    self,
    updates: optax.Updates,
    state: ElasticAverageState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, ElasticAverageState]:
    me, leaves = self.trainers.validate_and_enter(state, params, updates)
    own = me.own
    x, center = leaves.of(params), leaves.of(state.center)
    local_center = leaves.of(own.local_center)
    rate, rho = self._strengths(me.size, own.local_step)

    # 1. The gradient, with the pull of eq. 2 towards the center: rho * (x - center).
    # The pull is dense, so no gradient stays sparse.
    gradients = as_dense(leaves.of(updates))
    if not _is_zero(rho):
      gradients = [
        _pulled(g, x, c, rho)
        for g, x, c in zip(gradients, x, local_center, strict=True)
      ]

    # 2. A step of this replica.
    steps, inner_state = self.trainers.inner.update(
      leaves.put(updates, gradients), own.inner_state, params, **extra_args
    )
    u = leaves.of(steps)

    # 3. The exchange. Equal on all replicas, so either all of them exchange or none.
    meets = True if self.period == 1 else state.iterations + 1 >= self.period
    u, center, local_center, dropped = axes.when(
      meets,
      lambda: self._exchange(me, leaves, x, u, state, rate),
      lambda: (u, center, local_center, own.dropped_nonfinite),
    )
    global_step = optax.safe_increment(state.global_step)
    own = ElasticReplica(
      local_step=optax.safe_increment(own.local_step),
      local_center=leaves.put(own.local_center, local_center),
      inner_state=inner_state,
      dropped_nonfinite=dropped,
    )
    return leaves.put(steps, u), ElasticAverageState(
      global_step=jnp.where(meets, global_step, state.global_step),
      iterations=jnp.where(meets, 0, state.iterations + 1),
      center=leaves.put(state.center, center),
      replica=me.as_state(own),
    )

  def _strengths(self, size: int, local_step: jax.Array) -> tuple[Any, Any]:
    """The moving rate and rho of this step."""
    rate = self.moving_rate
    if rate is None:
      rate = 0.9 / self.period / size
    if self.rho is not None:
      return rate, self.rho
    at = self.learning_rate
    return rate, _ratio(rate, at(local_step) if callable(at) else at)

  def _exchange(
    self,
    me: Replica,
    leaves: Leaves,
    x: list[jax.Array],
    u: list[jax.Array],
    state: ElasticAverageState,
    rate: Any,
  ) -> tuple[Any, ...]:
    """Eq. 2 and 3: a replica moves by -pull, and the center by the sum of all pulls.

    With pull = rate * (x - center).
    """
    center = leaves.of(state.center)
    points = optax.apply_updates(x, u) if self.exchange == "after_step" else x
    gaps = [cast_like(p, c) - c for p, c in zip(points, center, strict=True)]
    gaps, finite = me.finite_or_zero(gaps, self.reject_nonfinite)
    pulls = [gap * cast_like(rate, gap) for gap in gaps]
    pulls, totals = self._send(me, leaves, pulls, state)
    moves = [u - cast_like(p, u) for u, p in zip(u, pulls, strict=True)]
    moved = [c + total for c, total in zip(center, totals, strict=True)]
    dropped = me.own.dropped_nonfinite + (~finite).astype(jnp.int32)
    return moves, moved, center, dropped

  def _send(
    self,
    me: Replica,
    leaves: Leaves,
    pulls: list[jax.Array],
    state: ElasticAverageState,
  ) -> tuple[list[jax.Array], list[jax.Array]]:
    """The change of a replica, and that of the center: the sum over the replicas."""
    if self.compression is None:
      return pulls, me.sum(pulls)
    # In a tree of all parameters, since random keys depend on a leaf's place.
    tree = leaves.put(replica_params.unmoved(state.center), pulls)
    nothing_left = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), tree)
    method = CompressionState(nothing_left, None, state.global_step)
    mean, method = aggregate(self.compression, tree, method, me.of.names)
    left = leaves.of(method.residual)
    sent = [cast_like(x - y, x) for x, y in zip(pulls, left, strict=True)]
    return sent, [x * jnp.asarray(me.size, x.dtype) for x in leaves.of(mean)]


def _check_sent(compression: Compression | None) -> None:
  """Checks that a compression shows which part of a replica's pull it has sent.

  Raises:
    ValueError: if it can't.
  """
  if compression is None:
    return
  if compression.error_feedback is None or not compression.is_mean:
    raise ValueError(
      f"{_NAME}: a replica moves by the sent part of its pull, so `compression`"
      " must be quantize or top_k, with error_feedback, which has the other part; got"
      f" {compression.name} with error_feedback={compression.error_feedback}."
    )


def _ratio(rate: Any, learning_rate: Any) -> Any:
  if all(isinstance(x, int | float) for x in (rate, learning_rate)):
    return rate / learning_rate
  rate, learning_rate = (
    jnp.asarray(x, jnp.float32) for x in (rate, learning_rate)
  )
  # A warm-up starts at 0, where nothing moves whatever the gradient is.
  moves = learning_rate > 0
  return jnp.where(moves, rate / jnp.where(moves, learning_rate, 1), 0)


def _pulled(g: jax.Array, x: jax.Array, c: jax.Array, rho: Any) -> jax.Array:
  """Returns ``g + rho * (x - c)``, rounded once."""
  wide = precision.for_sums(g)
  gap = cast_like(cast_like(x, c) - c, wide)
  return cast_like(wide + cast_like(rho, wide) * gap, g)


def _is_zero(rho: Any) -> bool:
  return isinstance(rho, int | float) and rho == 0
