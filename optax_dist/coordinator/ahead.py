"""An exchange among all replicas that need not wait for the chief.

Where every replica is needed, the members of the next attempt are known before
the chief names them. Each offers its gradient under a number that all compute
alike, aggregates, and reports; the chief commits if every arrival was offered
under the same number. Then neither an arrival nor an attempt is waited for.

A number is used once by a replica, so whoever has aggregated under it has
averaged the very same gradients. What fails here costs nothing: the chief then
starts the attempt as usual.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optax_dist.coordinator import data_plane, messages, view
from optax_dist.quorum import events

# Seconds to wait for those who compute longer; and for each byte.
_PATIENCE, _PATIENCE_FOR_BYTE = 0.05, 1e-9


def number(
  secret: bytes, term: int, step: int, incarnations: Sequence[int]
) -> int:
  """The number under which these offer their gradients of this step.

  Args:
    secret: of the job.
    term: the chief's.
    step: the global step.
    incarnations: the members, in replica order.

  Example:
    >>> one = number(b"s", 0, 7, [1, 0])
    >>> one == number(b"s", 0, 7, [1, 0]), one == number(b"s", 0, 8, [1, 0])
    (True, False)
  """
  return messages.ticket(secret, "ahead", term, step, *incarnations)


def attempt(
  secret: bytes, term: int, step: int, peers: Mapping[int, view.Peer]
) -> dict[str, Any]:
  """What the chief would tell of an attempt in which all peers take part."""
  by_id = {peer.replica: peer for peer in peers.values()}
  ordered = [by_id[replica] for replica in events.ordered(by_id)]
  members = [
    data_plane.Member(p.incarnation, p.replica, step, 1, 1.0, 0, -1)
    for p in ordered
  ]
  return {
    "step": step,
    "term": term,
    "attempt": number(secret, term, step, [p.incarnation for p in ordered]),
    "members": [list(m) for m in members],
    "audience": [],
  }


def patience(nbytes: int) -> float:
  """Seconds until an exchange of gradients of this size is given up."""
  return _PATIENCE + _PATIENCE_FOR_BYTE * nbytes
