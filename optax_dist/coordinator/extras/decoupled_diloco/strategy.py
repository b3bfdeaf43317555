"""Decoupled DiLoCo: learners on their own clocks merge a fragment at a time."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_dist._internal import checks
from optax_dist.coordinator.extras.decoupled_diloco import fragments as parts
from optax_dist.coordinator.extras.decoupled_diloco import rules as dd
from optax_dist.coordinator.extras.decoupled_diloco.learner import Learner
from optax_dist.coordinator.extras.decoupled_diloco.rounds import (
  Work,
)
from optax_dist.coordinator.protocol.entries import Fragments
from optax_dist.coordinator.strategies import hyperparams, strategy

# After missing this many rounds in a row, a learner doesn't wait to be called.
_MISSED = 2


class FragmentsState(NamedTuple):
  """The optimizer's part of the state that all learners share.

  Attributes:
    round: merges so far, int32; modulo the number of fragments, it is the
      fragment of the next round.
    outer: the outer optimizer's state of each fragment.
  """

  round: jax.Array
  outer: tuple[Any, ...]


class LearnerState(NamedTuple):
  """The local state of a learner.

  Attributes:
    params: its own parameters.
    opt_state: state of its own optimizer.
    round: the last merge of the shared state that it has seen.
    taken: the version of each fragment that it last merged.
    steps: its own steps since then, for each fragment.
    tokens: its tokens since then, for each fragment.
    local_step: how many steps it has taken.
    contributed_at: the step at which it last contributed.
    begins_at: the step from which it may begin the open round.
    missed: rounds merged without it, since the last one with it.
  """

  params: Any
  opt_state: Any
  round: int
  taken: np.ndarray
  steps: np.ndarray
  tokens: np.ndarray
  local_step: int
  contributed_at: int
  begins_at: int
  missed: int


class DecoupledDiloco(strategy.Strategy):
  """Learners on their own clocks, which merge a fragment at a time.

  Fragments take turns: the open round, a step of the coordinator, is for one of
  them. So a learner has at most one contribution in flight.

  Source: Douillard et al. 2026, Decoupled DiLoCo; the mixing and the order of
    fragments are those of Douillard et al. 2025, Streaming DiLoCo.

  Attributes:
    fragments: the rules' configuration; see `Strategy`.
  """

  name = "decoupled_diloco"
  loop = Learner
  # Each of its own steps is merged a fragment at a time.
  period = None

  def __init__(
    self,
    inner: optax.GradientTransformation,
    quorum: strategy.Quorum,
    fragments: Fragments,
    *,
    outer_optimizer: optax.GradientTransformation | None = None,
    alpha: float = 0.25,
    merge: Literal["radial", "mean"] = "radial",
  ):
    """Creates the strategy; `decoupled_diloco` documents the arguments."""
    n, k = quorum.total_num_replicas, quorum.replicas_to_aggregate
    if k > n:
      raise ValueError(
        "decoupled DiLoCo needs replicas_to_aggregate, its quorum, to be at"
        f" most total_num_replicas={n}, got {k}: each learner contributes once"
        " per round."
      )
    if quorum.max_staleness or quorum.weight is not None:
      raise ValueError(
        "decoupled DiLoCo has an option of its own for what is late:"
        f" max_staleness= of the strategy; got {quorum!r}."
      )
    self.quorum = quorum
    self.fragments: Fragments = fragments
    self._radial = merge == "radial"
    self._init = strategy.initialized_by(inner)
    self._update = strategy.applied_by(inner)
    outer = outer_optimizer
    if outer is None:
      outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    self._init_outer = strategy.initialized_by(outer)
    self._outer = optax.with_extra_args_support(outer)
    # For each fragment, the indices of its leaves.
    self._leaves: list[list[int]] = []
    self.apply = jax.jit(self._apply)
    self._pack = jax.jit(self._packed)
    self._mix = jax.jit(functools.partial(parts.mix, alpha=alpha))

  def shared(self, params: Any) -> strategy.SharedState:
    """The initial shared state."""
    leaves = jax.tree.leaves(params)
    self._leaves = parts.balanced_fragments(params, self.fragments.fragments)
    outer = tuple(
      self._init_outer(tuple(leaves[i] for i in own)) for own in self._leaves
    )
    state = FragmentsState(jnp.zeros([], jnp.int32), outer)
    own = hyperparams.find(self._init(params))
    return strategy.SharedState(params, state, own)

  def exchanged(self, params: Any) -> Any:
    """The largest fragment; what learners send of another one is shorter.

    With "radial" it is directions, along with the norm of each array: their sum
    gives the mean of directions and norms.
    """
    leaves = jax.tree.leaves(params)
    size = max(sum(leaves[i].size for i in own) for own in self._leaves)
    norms = max(map(len, self._leaves))
    fragment = jax.ShapeDtypeStruct((size,), jnp.float32)
    if not self._radial:
      return (fragment,)
    return fragment, jax.ShapeDtypeStruct((norms,), jnp.float32)

  def local(
    self, shared: strategy.SharedState, inner_state: Any = None
  ) -> LearnerState:
    """The state of a learner that has just joined."""
    params, round_ = shared.params, int(shared.opt_state.round)
    none = np.zeros(self.fragments.fragments, int)
    if inner_state is None:
      inner_state = self._init(params)
    return LearnerState(
      params,
      hyperparams.put(inner_state, shared.hyperparams),
      round_,
      taken=self._versions(round_),
      steps=none,
      tokens=none,
      local_step=0,
      contributed_at=0,
      begins_at=dd.turn(self.fragments, round_ % self.fragments.fragments),
      missed=0,
    )

  def inner_state(self, local: LearnerState) -> Any:
    """The state of the learner's own optimizer."""
    return local.opt_state

  def params(self, shared: strategy.SharedState, local: LearnerState) -> Any:
    """The learner's own parameters."""
    return local.params

  def train(self, local: LearnerState, grads: Any, tokens: int) -> LearnerState:
    """Takes a step of the learner's own optimizer.

    Args:
      local: the state before it.
      grads: a tree like its parameters.
      tokens: the number of tokens they were computed on.
    """
    own = strategy.SharedState(local.params, local.opt_state)
    after = self._update(own, grads)
    return local._replace(
      params=after.params,
      opt_state=after.opt_state,
      steps=local.steps + 1,
      tokens=local.tokens + tokens,
      local_step=local.local_step + 1,
    )

  def is_due(self, local: LearnerState, called: bool) -> bool:
    """Whether the learner should contribute to the open round.

    Args:
      local: the learner's state.
      called: whether others have contributed.
    """
    fragment = self.fragment(local)
    # A learner that is too slow to contribute when called contributes early; its
    # contribution then waits for the round.
    ready = self._begins(local, called) or local.missed >= _MISSED
    return ready and bool(local.steps[fragment] > 0)

  def _begins(self, local: LearnerState, called: bool) -> bool:
    return called or local.local_step >= local.begins_at

  def fragment(self, local: LearnerState) -> int:
    """The fragment of the open round."""
    return local.round % self.fragments.fragments

  def contribute(
    self,
    shared: strategy.SharedState,
    local: LearnerState,
    called: bool,
    step_seconds: float = 0.0,
  ) -> tuple[tuple[jax.Array, ...], Work, LearnerState]:
    """The learner's contribution to the open round.

    It is relative to the current shared state, not to the one that the learner
    started from: that state already includes a round that others have merged
    meanwhile, which would otherwise be applied twice.

    Args:
      shared: the current shared state.
      local: the learner's state.
      called: whether others have contributed.
      step_seconds: how long one of its own steps takes.

    Returns:
      The arrays to exchange, with the structure of `exchanged`; their description for
      the coordinator's rules; and the learner's state after it has contributed them.
    """
    fragment = self.fragment(local)
    payload = self._pack(
      self._of(fragment, shared.params), self._of(fragment, local.params)
    )
    late = self._versions(local.round) - local.taken
    work = Work(
      int(local.tokens[fragment]),
      int(local.steps[fragment]),
      step_seconds,
      int(late[fragment]),
      self._begins(local, called),
    )
    return payload, work, local._replace(contributed_at=local.local_step)

  def merge(
    self, shared: strategy.SharedState, local: LearnerState, merged: bool
  ) -> LearnerState:
    """Merges the others' rounds into the learner's parameters.

    Args:
      shared: the current shared state.
      local: the learner's state.
      merged: whether its contribution was merged, in round `local.round`.
    """
    rules, round_ = self.fragments, int(shared.opt_state.round)
    versions = self._versions(round_)
    late = versions - local.taken
    mine = np.arange(rules.fragments) == self.fragment(local)
    takes = ((late > 0) & mine & merged) | (late > rules.max_staleness)
    params = local.params
    for fragment in np.flatnonzero(takes).tolist():
      mixed = self._mix(
        self._of(fragment, params), self._of(fragment, shared.params)
      )
      params = self._with(fragment, params, mixed)
    # A merge that took long does not delay the next one.
    own = merged and round_ == local.round + 1
    began = local.contributed_at if own else local.local_step
    turn = dd.turn(rules, round_ % rules.fragments)
    missed = 0 if merged else local.missed + round_ - local.round
    return local._replace(
      params=params,
      opt_state=hyperparams.put(local.opt_state, shared.hyperparams),
      round=round_,
      taken=np.where(takes, versions, local.taken),
      steps=np.where(takes, 0, local.steps),
      tokens=np.where(takes, 0, local.tokens),
      begins_at=began + turn,
      missed=missed,
    )

  def _versions(self, round_: int) -> np.ndarray:
    """How often each fragment was merged in this many rounds."""
    n = self.fragments.fragments
    return (round_ - np.arange(n) + n - 1) // n

  def _of(self, fragment: int, tree: Any) -> tuple[Any, ...]:
    leaves = jax.tree.leaves(tree)
    return tuple(leaves[i] for i in self._leaves[fragment])

  def _with(self, fragment: int, tree: Any, new: tuple[Any, ...]) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    for i, leaf in zip(self._leaves[fragment], new, strict=True):
      leaves[i] = leaf
    return jax.tree.unflatten(treedef, leaves)

  # Learners exchange outer gradients, or directions and norms. Directions are scaled by
  # their number of elements, so that all arrays have similar magnitudes.

  def _packed(
    self, base: tuple[Any, ...], own: tuple[Any, ...]
  ) -> tuple[jax.Array, ...]:
    wide = lambda x: jnp.asarray(x, jnp.float32).reshape(-1)
    gaps = [wide(a) - wide(b) for a, b in zip(base, own, strict=True)]
    if not self._radial:
      return (jnp.concatenate(gaps),)
    norms = [jnp.linalg.norm(gap) for gap in gaps]
    directions = [
      gap * (_root(gap.size) / jnp.where(norm > 0, norm, 1.0))
      for gap, norm in zip(gaps, norms, strict=True)
    ]
    return jnp.concatenate(directions), jnp.stack(norms)

  def _unpacked(self, mean: Any, like: tuple[Any, ...]) -> tuple[Any, ...]:
    unpacked = []
    ends = np.cumsum([leaf.size for leaf in like])
    # The mean has the size of the largest fragment; the rest is not used.
    gaps = jnp.split(mean[0], ends)[: len(like)]
    for number, (leaf, gap) in enumerate(zip(like, gaps, strict=True)):
      if self._radial:
        length = jnp.linalg.norm(gap)
        # The mean of opposite directions is rounding error, and not a
        # direction.
        is_direction = length > 1e-6 * _root(leaf.size)
        gap = gap * (mean[1][number] / jnp.where(is_direction, length, 1.0))
        gap = jnp.where(is_direction, gap, 0.0)
      unpacked.append(gap.reshape(leaf.shape).astype(leaf.dtype))
    return tuple(unpacked)

  def _apply(
    self, shared: strategy.SharedState, mean: Any
  ) -> strategy.SharedState:
    mean = strategy.owned(mean, self.exchanged(shared.params))
    fragment = shared.opt_state.round % self.fragments.fragments
    merges = [
      functools.partial(self._merged, i)
      for i in range(self.fragments.fragments)
    ]
    return jax.lax.switch(fragment, merges, shared, mean)

  def _merged(
    self, fragment: int, shared: strategy.SharedState, mean: Any
  ) -> strategy.SharedState:
    params, state = shared.params, shared.opt_state
    mine = self._of(fragment, params)
    updates, outer = self._outer.update(
      self._unpacked(mean, mine), state.outer[fragment], mine
    )
    new = optax.apply_updates(mine, updates)
    states = (*state.outer[:fragment], outer, *state.outer[fragment + 1 :])
    return shared._replace(
      params=self._with(fragment, params, new),
      opt_state=FragmentsState(state.round + 1, states),
    )


def _root(size: int) -> float:
  return math.sqrt(max(size, 1))


def decoupled_diloco(
  outer_optimizer: optax.GradientTransformation | None = None,
  *,
  fragments: int = 4,
  period: int = 100,
  alpha: float = 0.25,
  overlap: int = 2,
  safety: float = 0.8,
  max_staleness: int = 1,
  merge: Literal["radial", "mean"] = "radial",
) -> strategy.Factory:
  """Decoupled DiLoCo, as the `strategy` of `join` and `run_embedded`.

  `Replica.step` never waits: a learner trains on, contributes a fragment of its
  progress when its own clock says so, and mixes in merged fragments when they
  are there. A round is merged with the learners that have contributed, once the
  quorum of `replicas_to_aggregate` is reached and either the grace window is
  over or all live learners have contributed.

  Args:
    outer_optimizer: applied to the merged ``old - new`` of a fragment; by
      default SGD with a learning rate of 0.7 and Nesterov momentum of 0.9.
    fragments: parts of the parameters that take turns.
    period: steps of the fastest learner between two rounds of a fragment; when
      it begins one, the others contribute what they have by then.
    alpha: the share of its own parameters that a learner keeps in the mixing.
    overlap: own steps that a merge may take; the grace window is part of these.
    safety: the fraction of it, from 0 to 1.
    max_staleness: how many rounds of a fragment a learner's progress on it may
      miss: it is carried into the fragment's next one, with its weight divided by
      1 + rounds missed. After more rounds, or with 0, it is dropped in favor of
      what was merged.
    merge: "radial" averages the norms and directions of each array separately,
      "mean" the numbers.

  Raises:
    ValueError: an argument is out of range; and, in `join`, it does not fit the
      parameters or the number of replicas.

  Source: Douillard et al. 2026, `Decoupled DiLoCo
  <https://arxiv.org/abs/2604.21428>`_.
  """
  fragments = checks.count("fragments", fragments)
  period = checks.count("period", period)
  overlap = checks.count("overlap", overlap, least=0)
  max_staleness = checks.count("max_staleness", max_staleness, least=0)
  checks.fraction("safety", safety)
  checks.fraction("alpha", alpha)
  if alpha == 1:
    raise ValueError("alpha must be below 1: nothing would be merged.")
  checks.one_of("merge", merge, ("radial", "mean"))
  if outer_optimizer is not None:
    strategy.initialized_by(outer_optimizer, "outer_optimizer")
  if period < fragments:
    raise ValueError(
      f"period must be at least fragments={fragments}, got {period!r}: each"
      " fragment needs a step of its own."
    )
  return lambda opt, quorum: DecoupledDiloco(
    opt,
    quorum,
    Fragments(fragments, period, overlap, safety, max_staleness),
    outer_optimizer=outer_optimizer,
    alpha=alpha,
    merge=merge,
  )
