"""Whether replicas have the same state, by the digests that they take of it."""

from __future__ import annotations

from optax_dist.coordinator.protocol import journal_events
from optax_dist.coordinator.protocol.coordinator.outbox import Outbox
from optax_dist.coordinator.protocol.entries import ReplicaId

# Steps whose fingerprints are compared.
_STEPS_KEPT = 64


class Fingerprints:
  """Compares the fingerprints of a step with the first one."""

  def __init__(self, out: Outbox):
    """Starts without fingerprints.

    Args:
      out: where the journal's lines go.
    """
    self._out = out
    # The first fingerprint of each step, and the replica that took it.
    self._known: dict[int, tuple[str, ReplicaId]] = {}

  def compare(self, replica: ReplicaId, step: int, digest: str) -> str:
    """Says how a replica's state differs from that of the first; "" if it does not."""
    known, first = self._known.setdefault(step, (digest, replica))
    if known != digest:
      return (
        f"After {step} steps replicas {first!r} and {replica!r} hold different "
        f"parameters or optimizer states ({known} and {digest})."
      )
    if first == replica:
      params, _, whole = digest.partition("-")
      self._out.note(journal_events.Fingerprint(step, replica, params, whole))
      for old in [s for s in self._known if s < step - _STEPS_KEPT]:
        del self._known[old]
    return ""
