"""The mean of gradients: of one slice of them, or of all of it.

Of gradients that members exchange, each member averages one slice; those that are
sent inline, in messages, the leader averages alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from optax_dist import ledger
from optax_dist.coordinator.aggregation import encoder as encoders
from optax_dist.coordinator.aggregation import means
from optax_dist.coordinator.protocol import entries
from optax_dist.ledger import Spans, tree


class Reducer:
  """Averages gradients of one model.

  Attributes:
    place: the layout of gradients.
    mean_place: the layout of means, with the same elements.
    feedback: the residuals of this replica's means; None if it rounds none.
  """

  def __init__(
    self, encoder: encoders.Encoder, data: ledger.Batches | None = None
  ):
    """Takes the layouts of an encoder.

    Args:
      encoder: of the gradients.
      data: deterministic data, whose micro-batches are added in the order of a
        tree; None: members are added from first to last.
    """
    self.place, self.mean_place = encoder.place, encoder.mean_place
    self.feedback = encoder.mean_feedback
    self._data = data

  def rows(self, part: entries.Part) -> int:
    """How many arrays a gradient consists of: one, or one for each node."""
    return len(self._nodes(part)) or 1

  def _nodes(self, part: entries.Part) -> Spans:
    return () if self._data is None else tree.nodes_at(self._data, part.data)

  def owed(self, start: int, stop: int) -> np.ndarray | None:
    """The residual of a slice, for `slice`; see `MeanFeedback.owed`."""
    if self.feedback is None:
      return None
    return self.feedback.owed(start, stop)

  def slice(
    self,
    parts: Sequence[entries.Part],
    rows: Sequence[np.ndarray] | np.ndarray,
    start: int,
    stop: int,
    out: np.ndarray,
    error: np.ndarray | None = None,
  ) -> None:
    """Averages a slice.

    Args:
      parts: the gradients, in order.
      rows: the slice's bytes of each of their arrays; or one array with a row for
        each.
      start: the slice's first element.
      stop: the element after its last.
      out: the slice's bytes of the mean; uint8.
      error: from `owed`; replaced by the new residual.
    """
    order = None
    if self._data is not None:
      nodes = itertools.chain(*map(self._nodes, parts))
      order = tree.whole(nodes, self._data.slots)
    # Padding between leaves may contain any values.
    with np.errstate(all="ignore"):
      means.mean_slice(
        rows,
        [part.weight for part in parts],
        sum(part.count for part in parts),
        self.place,
        self.mean_place,
        start,
        stop,
        out,
        error,
        () if self.feedback is None else self.feedback.gaps,
        order,
      )

  def whole(
    self, parts: Sequence[entries.Part], gradients: Sequence[bytes]
  ) -> bytes:
    """The mean of whole gradients; a mean in few bits gets no residual.

    Args:
      parts: the gradients, in order.
      gradients: their bytes, of the size that `rows` says.
    """
    # One array for all members, of which there may be hundreds.
    rows = np.frombuffer(b"".join(gradients), np.uint8)
    rows = rows.reshape(sum(map(self.rows, parts)), self.place.nbytes)
    out = np.zeros(self.mean_place.nbytes, np.uint8)
    self.slice(parts, rows, 0, self.place.elements, out)
    return out.tobytes()
