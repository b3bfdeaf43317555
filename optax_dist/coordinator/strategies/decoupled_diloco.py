"""Learners on clocks of their own, who merge a fragment at a time."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_dist import decoupled_diloco as dd
from optax_dist.coordinator.strategies import strategy

# Rounds in a row without a learner after which it doesn't wait to be called.
_MISSED = 2


class FragmentsState(NamedTuple):
  """The optimizer's part of what all learners share.

  Attributes:
    round: merges so far, int32; the fragment of the next one is this number
      modulo the number of fragments.
    outer: the outer optimizer's state of each fragment.
  """

  round: jax.Array
  outer: tuple[Any, ...]


class LearnerState(NamedTuple):
  """What a learner keeps for itself.

  Attributes:
    params: its own parameters.
    opt_state: of its own optimizer.
    round: merges of the shared state that it has last seen.
    taken: which version of each fragment it took in.
    steps: its own since then, of each fragment.
    tokens: the same.
    local_step: how many steps it has made.
    gave: the step at which it last gave something.
    ready: the step from which it is its turn to begin the round that is open.
    missed: rounds that were merged without it, since the last with it.
  """

  params: Any
  opt_state: Any
  round: int
  taken: tuple[int, ...]
  steps: tuple[int, ...]
  tokens: tuple[int, ...]
  local_step: int
  gave: int
  ready: int
  missed: int


class Given(NamedTuple):
  """A contribution to the round that is open.

  Attributes:
    payload: what is exchanged, as `exchanged` says.
    tokens: that were trained on since the version it began from.
    steps: the learner's own, since then.
    late: rounds of the fragment since then.
    begins: whether the round is under way with it.
  """

  payload: tuple[jax.Array, ...]
  tokens: int
  steps: int
  late: int
  begins: bool


class DecoupledDiloco:
  """Learners on clocks of their own, who merge a fragment at a time.

  Fragments take turns: the round that is open, a step of the coordinator, is of
  one of them. So a learner has one contribution under way at most.

  Source: Douillard et al. 2026, Decoupled DiLoCo; the mixing and the turns are
  of Douillard et al. 2025, Streaming DiLoCo.

  Attributes:
    rules: the numbers of the run.
    size: of the longest fragment, in numbers; known after `shared`.
  """

  name = "decoupled_diloco"
  sums = alone = False
  differences = True
  # A step of its own is merged a fragment at a time.
  period = None

  def __init__(
    self,
    inner: optax.GradientTransformation,
    quorum: strategy.Quorum,
    rules: dd.Config,
    *,
    outer_optimizer: optax.GradientTransformation | None = None,
    alpha: float = 0.25,
    merge: Literal["radial", "mean"] = "radial",
  ):
    """Makes one; `decoupled_diloco` tells of the arguments."""
    n, k = quorum.total_num_replicas, quorum.replicas_to_aggregate
    if k > n:
      raise ValueError(
        "decoupled DiLoCo needs replicas_to_aggregate, its quorum, to be at"
        f" most total_num_replicas={n}, got {k}: a learner has one contribution"
        " to give."
      )
    if quorum.max_staleness or quorum.weight is not None:
      raise ValueError(
        "decoupled DiLoCo has options of its own for what is late: late= and"
        f" max_staleness= of the strategy; got {quorum!r}."
      )
    if not 0 <= alpha < 1:
      raise ValueError(f"alpha must be from 0 to below 1, got {alpha!r}.")
    if merge not in ("radial", "mean"):
      raise ValueError(f"merge must be 'radial' or 'mean', got {merge!r}.")
    dd.init(rules)
    if rules.period < rules.fragments:
      raise ValueError(
        f"period must be at least fragments={rules.fragments}, got"
        f" {rules.period!r}: a fragment is given at a step of its own."
      )
    self.quorum, self.rules = quorum, rules
    self._radial = merge == "radial"
    self._init = inner.init
    self._update = strategy.applied_by(inner)
    self._outer = optax.with_extra_args_support(
      outer_optimizer or optax.sgd(0.7, momentum=0.9, nesterov=True)
    )
    # Of each fragment, the indices of its leaves.
    self._leaves: list[list[int]] = []
    self._sizes: list[list[int]] = []
    self.size = self._norms = 0
    self._alpha = alpha
    self.apply = jax.jit(self._apply)
    self._pack = jax.jit(self._packed)
    self._hear = jax.jit(self._heard, static_argnums=0)
    self._mix = jax.jit(functools.partial(dd.mix, alpha=alpha))

  def shared(self, params: Any) -> strategy.SharedState:
    """The shared state at the start."""
    leaves = jax.tree.leaves(params)
    fragments = self.rules.fragments
    dealt = jax.tree.leaves(dd.balanced_fragments(params, fragments))
    self._leaves = [
      [i for i, f in enumerate(dealt) if f == fragment]
      for fragment in range(fragments)
    ]
    self._sizes = [[leaves[i].size for i in own] for own in self._leaves]
    self.size = max(map(sum, self._sizes))
    self._norms = max(map(len, self._leaves)) if self._radial else 0
    outer = tuple(
      self._outer.init(tuple(leaves[i] for i in own)) for own in self._leaves
    )
    state = FragmentsState(jnp.zeros([], jnp.int32), outer)
    return strategy.SharedState(params, state)

  def exchanged(self, params: Any) -> Any:
    """What learners send: a fragment, as long as the longest one.

    With "radial" it is directions, and the norm of each array beside them: the
    sum of both is the mean of directions and norms.
    """
    fragment = jax.ShapeDtypeStruct((self.size,), jnp.float32)
    if not self._radial:
      return (fragment,)
    return fragment, strategy.Exact((self._norms,), np.dtype(np.float32))

  def sizes(self, fragment: int) -> tuple[int, ...]:
    """How many numbers of each array that is sent are of this fragment."""
    size = sum(self._sizes[fragment])
    return (size, self._norms) if self._radial else (size,)

  def local(self, shared: strategy.SharedState) -> LearnerState:
    """The state of a learner that has just joined."""
    params, round_ = shared.params, int(shared.opt_state.round)
    none = (0,) * self.rules.fragments
    return LearnerState(
      params,
      self._init(params),
      round_,
      self._versions(round_),
      none,
      none,
      0,
      0,
      dd.turn(self.rules, round_ % self.rules.fragments),
      0,
    )

  def params(self, shared: strategy.SharedState, local: LearnerState) -> Any:
    """The learner's own."""
    return local.params

  def contribute(
    self, shared: Any, local: LearnerState, grads: Any
  ) -> tuple[Any, LearnerState]:
    """Takes a step of a token; what there is to give, `give` says."""
    return None, self.train(local, grads, 1)

  def train(self, local: LearnerState, grads: Any, tokens: int) -> LearnerState:
    """The learner's own step.

    Args:
      local: before it.
      grads: like its parameters.
      tokens: that they were computed on.
    """
    own = strategy.SharedState(local.params, local.opt_state)
    after = self._update(own, grads)
    return local._replace(
      params=after.params,
      opt_state=after.opt_state,
      steps=tuple(n + 1 for n in local.steps),
      tokens=tuple(n + tokens for n in local.tokens),
      local_step=local.local_step + 1,
    )

  def is_due(self, local: LearnerState, called: bool) -> bool:
    """Whether the learner gives its part of the round that is open.

    Args:
      local: of the learner.
      called: whether others have given theirs.
    """
    fragment = self.fragment(local)
    # One that is too slow to come when it is called waits there for the others.
    ready = self._begins(local, called) or local.missed >= _MISSED
    return ready and local.steps[fragment] > 0

  def _begins(self, local: LearnerState, called: bool) -> bool:
    return called or local.local_step >= local.ready

  def fragment(self, local: LearnerState) -> int:
    """Which fragment the round that is open is of."""
    return local.round % self.rules.fragments

  def give(
    self,
    shared: strategy.SharedState,
    local: LearnerState,
    called: bool,
    owed: Any = None,
  ) -> tuple[Given, LearnerState]:
    """The learner's contribution to the round that is open.

    It is counted from what all share now, not from what the learner began from:
    a round that others have merged meanwhile is in there already, and would be
    made a second time.

    Args:
      shared: what all share now.
      local: of the learner.
      called: whether others have given theirs.
      owed: what of this fragment earlier contributions left out, float32 of
        `size`; None where they leave nothing out.
    """
    fragment = self.fragment(local)
    payload = self._pack(
      self._of(fragment, shared.params), self._of(fragment, local.params), owed
    )
    given = Given(
      payload,
      local.tokens[fragment],
      local.steps[fragment],
      self._versions(local.round)[fragment] - local.taken[fragment],
      self._begins(local, called),
    )
    return given, local._replace(gave=local.local_step)

  def sent(
    self, fragment: int, payload: Any, heard: Any, owed: Any
  ) -> tuple[Any, jax.Array]:
    """What is told beside a contribution, and kept, on a wire that leaves some out.

    The merge is that of what was heard: norms are of that, too. Of what was left
    out, `alpha` is still in the learner's own parameters after the merge, and is
    given again with them; the rest is to be kept.

    Args:
      fragment: what was given is of.
      payload: of `give`.
      heard: what the others read of its first array.
      owed: what was given to `give`.

    Returns:
      The payload to send, and what to keep if it counts, like `owed`.
    """
    return self._hear(fragment, payload, heard, owed)

  def take_in(
    self, shared: strategy.SharedState, local: LearnerState, merged: bool
  ) -> LearnerState:
    """Goes on from what the others have merged.

    Args:
      shared: what all share now.
      local: of the learner.
      merged: whether its own contribution is in; it was to `local.round`.
    """
    rules, round_ = self.rules, int(shared.opt_state.round)
    mine = local.round % rules.fragments if merged else -1
    most = rules.max_staleness if rules.late == "carry" else 0
    old, new = local.taken, self._versions(round_)
    taken = [
      f
      for f in range(rules.fragments)
      if new[f] > old[f] and (f == mine or new[f] - old[f] > most)
    ]
    # A merge that was under way for long does not put the next one off.
    own = merged and round_ == local.round + 1
    began = local.gave if own else local.local_step
    turn = dd.turn(rules, round_ % rules.fragments)
    missed = 0 if merged else local.missed + round_ - local.round
    local = local._replace(round=round_, ready=began + turn, missed=missed)
    for fragment in taken:
      local = self._took(shared, local, fragment, new[fragment])
    return local

  def settle(
    self,
    before: Any,
    after: strategy.SharedState,
    local: LearnerState,
    mine: bool,
  ) -> LearnerState:
    """Drops what the learner has of its own, but for its optimizer's state."""
    fresh = self.local(after)
    return fresh._replace(opt_state=local.opt_state)

  def forget(
    self, shared: strategy.SharedState, local: LearnerState
  ) -> LearnerState:
    """The same."""
    return self.settle(shared, shared, local, mine=False)

  def _took(
    self,
    shared: strategy.SharedState,
    local: LearnerState,
    fragment: int,
    version: int,
  ) -> LearnerState:
    """The learner has mixed a fragment with its own."""
    new = self._of(fragment, shared.params)
    mixed = self._mix(self._of(fragment, local.params), new)
    return local._replace(
      params=self._with(fragment, local.params, mixed),
      taken=_at(local.taken, fragment, version),
      steps=_at(local.steps, fragment, 0),
      tokens=_at(local.tokens, fragment, 0),
    )

  def _versions(self, round_: int) -> tuple[int, ...]:
    """How often each fragment was merged in so many rounds."""
    n = self.rules.fragments
    return tuple((round_ - fragment + n - 1) // n for fragment in range(n))

  def _of(self, fragment: int, tree: Any) -> tuple[Any, ...]:
    leaves = jax.tree.leaves(tree)
    return tuple(leaves[i] for i in self._leaves[fragment])

  def _with(self, fragment: int, tree: Any, new: tuple[Any, ...]) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    for i, leaf in zip(self._leaves[fragment], new, strict=True):
      leaves[i] = leaf
    return jax.tree.unflatten(treedef, leaves)

  # What is exchanged: outer gradients, or directions and norms. Directions are as
  # long as they have numbers, so that those of all arrays are alike in size and a
  # wire of few bits can send them together.

  def _packed(
    self, base: tuple[Any, ...], own: tuple[Any, ...], owed: Any
  ) -> tuple[jax.Array, ...]:
    wide = lambda x: jnp.asarray(x, jnp.float32).reshape(-1)
    gaps = [wide(a) - wide(b) for a, b in zip(base, own, strict=True)]
    if owed is not None:
      more = _split(owed, [gap.size for gap in gaps])
      gaps = [gap + x for gap, x in zip(gaps, more, strict=True)]
    if not self._radial:
      return (_joined(gaps, self.size),)
    norms = [_norm(gap) for gap in gaps]
    directions = [
      gap * (_root(gap.size) / jnp.where(norm > 0, norm, 1.0))
      for gap, norm in zip(gaps, norms, strict=True)
    ]
    return _joined(directions, self.size), _padded(norms, self._norms)

  def _unpacked(self, mean: Any, like: tuple[Any, ...]) -> tuple[Any, ...]:
    found = []
    gaps = _split(mean[0], [leaf.size for leaf in like])
    for number, (leaf, gap) in enumerate(zip(like, gaps, strict=True)):
      if self._radial:
        length = _norm(gap)
        # What is left of opposite directions is rounding, and no direction.
        sound = length > 1e-6 * _root(leaf.size)
        gap = gap * (mean[1][number] / jnp.where(sound, length, 1.0))
        gap = jnp.where(sound, gap, 0.0)
      found.append(gap.reshape(leaf.shape).astype(leaf.dtype))
    return tuple(found)

  def _heard(
    self, fragment: int, payload: Any, heard: Any, owed: Any
  ) -> tuple[Any, jax.Array]:
    sizes = self._sizes[fragment]
    given, heard_of = _split(payload[0], sizes), _split(heard, sizes)
    left = [a - b for a, b in zip(given, heard_of, strict=True)]
    if self._radial:
      scales = [payload[1][i] / _root(n) for i, n in enumerate(sizes)]
      left = [x * scale for x, scale in zip(left, scales, strict=True)]
      norms = [_norm(x) * s for x, s in zip(heard_of, scales, strict=True)]
      payload = (payload[0], _padded(norms, self._norms))
    kept = (1 - self._alpha) * _joined(left, self.size) + self._alpha * owed
    return payload, kept

  def _apply(
    self, shared: strategy.SharedState, mean: Any, members: Any = None
  ) -> strategy.SharedState:
    mean = strategy.owned(mean, self.exchanged(shared.params))
    fragment = shared.opt_state.round % self.rules.fragments
    merges = [
      functools.partial(self._merged, i) for i in range(self.rules.fragments)
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
    return strategy.SharedState(
      self._with(fragment, params, new),
      FragmentsState(state.round + 1, states),
    )


def _at(numbers: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
  """The numbers with one of them changed."""
  return (*numbers[:index], value, *numbers[index + 1 :])


def _split(flat: Any, sizes: Sequence[int]) -> list[jax.Array]:
  """The arrays of a fragment, flat."""
  ends = list(itertools.accumulate(sizes))
  return [flat[end - n : end] for n, end in zip(sizes, ends, strict=True)]


def _joined(arrays: Sequence[jax.Array], size: int) -> jax.Array:
  """The reverse of `_split`, padded."""
  flat = jnp.concatenate(arrays)
  return jnp.pad(flat, (0, size - flat.size))


def _padded(numbers: Sequence[jax.Array], size: int) -> jax.Array:
  return _joined([jnp.reshape(x, 1) for x in numbers], size)


def _norm(x: jax.Array) -> jax.Array:
  return jnp.sqrt(jnp.sum(jnp.square(x)))


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
  late: Literal["carry", "drop"] = "carry",
  max_staleness: int = 1,
  merge: Literal["radial", "mean"] = "radial",
) -> strategy.Factory:
  """Decoupled DiLoCo, as the `strategy` of `join` and `run_embedded`.

  `Replica.step` never waits: a learner trains on, gives a fragment of what it has
  learned when its own clock says so, and takes in what was merged when it is
  there. A round is merged by those who are in it once `replicas_to_aggregate`
  are, its quorum, and the grace window is over, or all who live are in.

  Args:
    outer_optimizer: is given the merged ``old - new`` of a fragment; by default
      SGD with a rate of 0.7 and Nesterov's momentum of 0.9.
    fragments: parts of the parameters that take turns.
    period: steps of the fastest learner between two rounds of a fragment; when
      it begins one, the others give what they have by then.
    alpha: what a learner keeps of its own when it takes a fragment in.
    overlap: own steps that a merge may take; the window is a part of these.
    safety: which part, from 0 to 1.
    late: what becomes of a learner's progress on a fragment whose round it has
      missed: it is carried into the fragment's next one, where it counts for
      1 / (1 + rounds late) of its weight, or dropped for what was merged.
    max_staleness: rounds by which what is carried may be late.
    merge: "radial" averages norms and directions of each array apart, "mean" the
      numbers.

  Raises:
    ValueError: an argument is out of range (told by `join`).

  Source: Douillard et al. 2026, `Decoupled DiLoCo
  <https://arxiv.org/abs/2604.21428>`_.
  """
  return lambda opt, quorum: DecoupledDiloco(
    opt,
    quorum,
    dd.Config(
      fragments,
      period,
      quorum.replicas_to_aggregate,
      overlap,
      safety,
      late,
      max_staleness,
    ),
    outer_optimizer=outer_optimizer,
    alpha=alpha,
    merge=merge,
  )
