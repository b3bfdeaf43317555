"""The samples of an epoch, their order, and how many a step takes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from optax_dist._internal import checks
from optax_dist.ledger.spans import Spans

if TYPE_CHECKING:
  import numpy as np


# The largest integer that a message can have.
_LARGEST = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class Batches:
  """The data of a run; equal on all replicas.

  The samples of all epochs, each in its own order, form one stream; a
  *position* in it is an integer that counts through the epochs.

  Attributes:
    num_samples: samples in an epoch.
    global_batch: samples in a step, over all replicas.
    seed: seed of the order.
    epochs: number of epochs in the run; None for no limit.
    shuffle: whether each epoch is shuffled; otherwise the order is 0, 1, 2...
    mode: "exact": a new epoch begins when the rest of the last one no longer
      fills a step; samples after the last full batch of an epoch are left out
      of it (different ones in each epoch). "streaming": there is no waiting and
      nothing is left out; samples that return late are in the next epoch's
      first steps.
    micro_batch: samples in a micro-batch, or slot, of a deterministic run; it
      divides `global_batch`.
    deterministic: whether step s always has the micro-batches at positions
      s * global_batch up to (s + 1) * global_batch, on whichever replicas. What
      a step adds up does then not depend on the number of replicas, on losses,
      or on which replicas were fast.
    audit: the part of all micro-batches of a deterministic run that two replicas
      compute, to find replicas whose gradients are wrong: from 0 to 1.

  Example:
    >>> data = Batches(num_samples=10, global_batch=4, seed=1, epochs=2)
    >>> data.per_epoch, data.total
    (8, 16)
    >>> data.indices(((6, 10),)).tolist()  # The end of an epoch, and the next.
    [5, 9, 4, 8]
  """

  num_samples: int
  global_batch: int
  seed: int = 0
  epochs: int | None = 1
  shuffle: bool = True
  mode: Literal["exact", "streaming"] = "exact"
  micro_batch: int | None = None
  deterministic: bool = False
  audit: float = 0.0

  def __post_init__(self) -> None:
    self._check_types()
    if self.global_batch > self.num_samples:
      raise ValueError(
        f"global_batch must be at most num_samples={self.num_samples}, got "
        f"{self.global_batch}."
      )
    if self.deterministic and self.micro_batch is None:
      raise ValueError(
        "deterministic=True needs micro_batch, the samples of a gradient: it may"
        " not depend on the number of replicas."
      )
    if self.micro_batch is not None:
      if not self.deterministic:
        raise ValueError("micro_batch needs deterministic=True.")
      if self.global_batch % self.micro_batch:
        raise ValueError(
          f"micro_batch must divide global_batch={self.global_batch}, got "
          f"{self.micro_batch}."
        )
    if (self.total or 0) > _LARGEST:
      raise ValueError(
        f"num_samples * epochs must be below 2**63, got {self.num_samples} *"
        f" {self.epochs}. For runs without an end use epochs=None."
      )
    if self.audit and not self.deterministic:
      raise ValueError("audit needs deterministic=True.")

  def _check_types(self) -> None:
    """Checks each argument by itself, and makes NumPy's numbers plain ones."""
    least = {"num_samples": 1, "global_batch": 1, "seed": 0}
    least |= {
      name: 1
      for name in ("epochs", "micro_batch")
      if getattr(self, name) is not None
    }
    for name, number in least.items():
      value = getattr(self, name)
      value = checks.count(name, value, least=number, most=_LARGEST)
      object.__setattr__(self, name, value)
    checks.one_of("mode", self.mode, ("exact", "streaming"))
    checks.fraction("audit", self.audit)
    object.__setattr__(self, "audit", float(self.audit))
    for name in ("shuffle", "deterministic"):
      checks.flag(name, getattr(self, name))
      object.__setattr__(self, name, bool(getattr(self, name)))

  @property
  def per_epoch(self) -> int:
    """Positions in an epoch; in exact mode full batches only."""
    if self.mode == "streaming":
      return self.num_samples
    return self.num_samples // self.global_batch * self.global_batch

  @property
  def order(self) -> dict[str, object]:
    """The fields that determine which sample is at a position."""
    return {
      "num_samples": self.num_samples,
      "samples in an epoch": self.per_epoch,
      "shuffle": self.shuffle,
      "seed": self.seed if self.shuffle else None,
    }

  @property
  def total(self) -> int | None:
    """The total number of positions; None if there is no limit."""
    return None if self.epochs is None else self.per_epoch * self.epochs

  @property
  def slots(self) -> int:
    """Micro-batches in a step of a deterministic run.

    Raises:
      ValueError: it is not deterministic.

    Example:
      >>> Batches(100, 24, micro_batch=2, deterministic=True).slots
      12
    """
    if self.micro_batch is None:
      raise ValueError("slots needs deterministic=True.")
    return self.global_batch // self.micro_batch

  def audited(self, spans: Spans) -> tuple[int, ...]:
    """The first positions of the micro-batches that two replicas compute.

    Args:
      spans: whole micro-batches.

    Example:
      >>> data = Batches(100, 24, micro_batch=2, deterministic=True, audit=0.1)
      >>> data.audited(((0, 48),))
      (0,)
    """
    if not self.audit:
      return ()
    size = self.micro_batch
    assert size is not None
    from optax_dist.ledger import shuffle

    places = [p for start, stop in spans for p in range(start, stop, size)]
    return tuple(p for p in places if shuffle.share(self.seed, p) < self.audit)

  def unit(self, gradients_per_step: int) -> int:
    """Samples in one gradient.

    Raises:
      ValueError: the gradients of a step don't divide `global_batch`.
    """
    if self.global_batch % gradients_per_step:
      raise ValueError(
        f"global_batch must be a multiple of the {gradients_per_step} gradients"
        f" of a step (replicas_to_aggregate), got {self.global_batch}."
      )
    return self.global_batch // gradients_per_step

  def indices(self, spans: Spans) -> np.ndarray:
    """The samples at these positions, in order: int64 indices."""
    import numpy as np

    parts = [_indices(self, *part) for part in self._by_epoch(spans)]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)

  def left_out(self, epoch: int) -> np.ndarray:
    """The samples left out of an epoch, sorted; none when streaming.

    Example:
      >>> data = Batches(num_samples=10, global_batch=4, seed=1, epochs=2)
      >>> data.left_out(0).tolist(), data.left_out(1).tolist()
      ([1, 2], [3, 7])
    """
    indices = _indices(self, epoch, self.per_epoch, self.num_samples)
    indices.sort()
    return indices

  def _by_epoch(self, spans: Spans) -> list[tuple[int, int, int]]:
    """Splits spans into epochs, each with positions in it, from and to."""
    parts = []
    for start, stop in spans:
      while start < stop:
        epoch = start // self.per_epoch
        base = epoch * self.per_epoch
        end = min(stop, base + self.per_epoch)
        parts.append((epoch, start - base, end - base))
        start = end
    return parts


def _indices(data: Batches, epoch: int, start: int, stop: int) -> np.ndarray:
  # Imported here, as a coordinator's process has no arrays, and has to start quickly.
  import numpy as np

  from optax_dist.ledger import shuffle

  places = np.arange(start, stop, dtype=np.int64)
  if not data.shuffle:
    return places
  return shuffle.permuted(places, data.num_samples, data.seed, epoch)
