"""RETURNN's learning rates from epoch to epoch."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from optax_dist.optimizers.returnn.options import Options

_RELATIVE = ("newbob", "newbob_rel", "newbob_relative")
_KINDS = ("constant", *_RELATIVE, "newbob_abs", "newbob_multi_epoch")


def returnn_learning_rates(
  config: Mapping[str, Any], scores: Sequence[float | None] = ()
) -> list[float]:
  """Computes RETURNN's learning rates of the epochs so far, and of the next one.

  The rates follow from the options and the scores alone, so there is no state to
  save: call it after each epoch with all scores.

  Args:
    config: The options of a configuration, of which these are read:
      ``learning_rate``, ``learning_rates``, ``learning_rate_control``,
      ``min_learning_rate``, ``learning_rate_decay`` or
      ``newbob_learning_rate_decay``, ``learning_rate_growth`` or
      ``newbob_learning_rate_growth``, ``newbob_relative_error_threshold``,
      ``newbob_relative_error_grow_threshold``, ``newbob_error_threshold``,
      ``newbob_multi_num_epochs``, ``newbob_multi_update_interval``,
      ``newbob_relative_error_div_by_old``,
      ``learning_rate_control_relative_error_relative_lr``,
      ``learning_rate_control_min_num_epochs_per_new_lr``.
    scores: The score of each epoch from the first, lower is better: the measure
      that RETURNN calls ``learning_rate_control_error_measure``. None for an
      epoch without one.

  Returns:
    The learning rates of epochs 1 to ``len(scores) + 1``.

  Raises:
    ValueError: If an option is unknown or out of its range.

  Source: ``returnn.learning_rate_control``.

  Example:
    >>> config = {"learning_rate": 1.0, "learning_rate_control": "newbob"}
    >>> returnn_learning_rates(config, [2.0, 1.5, 1.499])
    [1.0, 1.0, 1.0, 0.5]
  """
  options = Options(config)
  kind = options.get("learning_rate_control", "constant")
  if kind not in _KINDS:
    raise ValueError(
      f"learning_rate_control must be one of {', '.join(_KINDS)}, got {kind!r}"
    )
  if options.is_on("pretrain") and not options.flag(
    "use_learning_rate_control_always"
  ):
    raise ValueError(
      "pretrain must be off here, or use_learning_rate_control_always on: leave it"
      " out, and list the rate of each of its epochs in `learning_rates`, {epoch:"
      " pretrain_learning_rate}, and learning_rate for the first one after them"
    )
  history = _History(options, scores)
  rule = {"constant": _constant, "newbob_abs": _absolute}.get(kind, _relative)
  if kind == "newbob_multi_epoch":
    rule = _multi_epoch
  held = options.whole("learning_rate_control_min_num_epochs_per_new_lr")
  for epoch in range(1, len(scores) + 2):
    if epoch in history.rates:
      continue
    last = [history.rates[e] for e in history.before(epoch)[-held:]]
    is_held = held > 1 and (len(set(last)) >= 2 or 0 < len(last) < held)
    history.rates[epoch] = last[-1] if is_held else rule(history, epoch)
  return [history.rates[epoch] for epoch in range(1, len(scores) + 2)]


class _History:
  """The learning rates and the scores by epoch, and how rates change."""

  def __init__(self, options: Options, scores: Sequence[float | None]):
    self.options = options
    self.scores = dict(enumerate(scores, start=1))
    self.initial = options.number("learning_rate", 1.0)
    self.rates = _given_rates(options)
    self._least = options.number("min_learning_rate")
    self._decay, self._growth = (
      _change(options, f"learning_rate_{name}", default)
      for name, default in (("decay", 0.5), ("growth", 1.0))
    )
    self._by_old = options.flag("newbob_relative_error_div_by_old")
    self._by_rate = options.flag(
      "learning_rate_control_relative_error_relative_lr"
    )

  def before(self, epoch: int) -> list[int]:
    """The epochs before one that have a learning rate, in order."""
    return sorted(e for e in self.rates if e < epoch)

  def last_rate(self, epoch: int) -> float:
    """The learning rate of the last epoch before one, or the initial one."""
    before = self.before(epoch)
    return self.rates[before[-1]] if before else self.initial

  def difference(self, old: int, new: int) -> float | None:
    """How much larger the score of an epoch is; None if there is none."""
    scores = self.scores.get(old), self.scores.get(new)
    if scores[0] is None or scores[1] is None:
      return None
    return float(scores[1]) - float(scores[0])

  def relative_difference(self, old: int, new: int) -> float | None:
    """The same relative to one of the scores, and maybe to the learning rate."""
    difference = self.difference(old, new)
    if difference is None:
      return None
    size = abs(float(self.scores[old if self._by_old else new] or 0))
    if not size:
      raise ValueError(
        "scores must not be 0 where changes are relative, got 0 for epoch"
        f" {old if self._by_old else new}"
      )
    relative = difference / size
    if self._by_rate and self.rates[new] > 0:
      relative /= self.rates[new] / self.initial
    return relative

  def decayed(self, rate: float) -> float:
    return max(self._decay(rate), self._least)

  def grown(self, rate: float) -> float:
    return self._growth(rate)


def _given_rates(options: Options) -> dict[int, float]:
  """The learning rates that the configuration lists, by epoch."""
  rates = options.get("learning_rates")
  if rates is None or len(rates) == 0:
    return {}
  if isinstance(rates, str):
    raise ValueError(
      f"learning_rates must be a list or a mapping by epoch, got {rates!r}"
    )
  if not isinstance(rates, Mapping):
    rates = dict(enumerate(rates, start=1))
  return {int(epoch): float(rate) for epoch, rate in rates.items()}


def _change(
  options: Options, name: str, default: float
) -> Callable[[float], float]:
  """How the learning rate decays or grows: by a factor, or a function of it."""
  key = name if name in options else f"newbob_{name}"
  value = options.get(key)
  if callable(value):
    return lambda rate: float(value(rate))
  # None means no change, not the default.
  factor = options.number(key, 1.0 if key in options else default)
  return lambda rate: rate * factor


def _constant(history: _History, epoch: int) -> float:
  return history.last_rate(epoch)


def _newbob(history: _History, epoch: int, change: Any, threshold: float):
  rate = history.last_rate(epoch)
  before = history.before(epoch)
  value = change(*before[-2:]) if len(before) >= 2 else None
  if value is None:
    return rate
  return history.decayed(rate) if value > threshold else history.grown(rate)


def _relative(history: _History, epoch: int) -> float:
  number = history.options.number
  threshold = number("newbob_relative_error_threshold", -0.01)
  return _newbob(history, epoch, history.relative_difference, threshold)


def _absolute(history: _History, epoch: int) -> float:
  threshold = history.options.number("newbob_error_threshold", -0.01)
  return _newbob(history, epoch, history.difference, threshold)


def _multi_epoch(history: _History, epoch: int) -> float:
  """Looks at the mean relative change over several epochs."""
  options = history.options
  epochs = options.whole("newbob_multi_num_epochs", 5)
  interval = options.whole("newbob_multi_update_interval", epochs)
  if min(epochs, interval) < 1:
    raise ValueError(
      "newbob_multi_num_epochs and newbob_multi_update_interval must be at least 1,"
      f" got {epochs} and {interval}"
    )
  decays_above = options.number("newbob_relative_error_threshold", -0.01)
  grows_below = options.number(
    "newbob_relative_error_grow_threshold", decays_above
  )
  if grows_below > decays_above:
    raise ValueError(
      "newbob_relative_error_grow_threshold must be at most"
      f" newbob_relative_error_threshold, {decays_above}, got {grows_below}"
    )
  rate = history.last_rate(epoch)
  if interval > 1 and epoch % interval != 1:
    return rate
  last = history.before(epoch)[-(epochs + 1) :]
  changes = [
    history.relative_difference(*pair) for pair in itertools.pairwise(last)
  ]
  known = [change for change in changes if change is not None]
  if not changes or len(known) < len(changes):
    return rate
  mean = float(np.mean(known))
  if mean > decays_above:
    return history.decayed(rate)
  return history.grown(rate) if mean < grows_below else rate
