"""Who takes part: what the log says, the same for everyone who has read it."""

from __future__ import annotations

import dataclasses
from typing import Any

from optax_dist import quorum


@dataclasses.dataclass(frozen=True)
class Peer:
  """A replica that takes part.

  Attributes:
    incarnation: the number of its admission, unique in the job.
    replica: its id.
    address: of its exchange.
  """

  incarnation: int
  replica: quorum.Replica
  address: str


class View:
  """Membership, as of a position of the log.

  Attributes:
    term: how often the role of chief was taken.
    chief: the chief's incarnation, or None where there is none.
    chief_address: of the exchange of the latest chief; None before the first.
    step: the global step.
    peers: those who take part, by incarnation.
    gone: ids of those who do not any more, and whether they left ("left") or
      were lost ("lost").
    hellos: how many requests to join were answered.
  """

  def __init__(self) -> None:
    self.term = -1
    self.chief: int | None = None
    self.chief_address: str | None = None
    self.step = 0
    self.peers: dict[int, Peer] = {}
    self.gone: dict[quorum.Replica, str] = {}
    self.hellos = 0

  def update(self, entry: dict[str, Any]) -> None:
    """Takes one entry of the log into account."""
    kind = entry["kind"]
    if kind == "term":
      self.term, self.chief = entry["term"], entry["incarnation"]
      self.chief_address = entry["address"]
      self.step = max(self.step, entry["step"])
    elif kind == "resign":
      self.chief = None
    elif kind == "join":
      self._load(entry["view"])
    elif kind == "refuse":
      self.hellos = max(self.hellos, entry["incarnation"] + 1)
    elif kind == "gone":
      peer = self.peers.pop(entry["incarnation"], None)
      if peer is not None:
        self.gone[peer.replica] = (
          "left" if entry["reason"] == "left" else "lost"
        )
      if entry["incarnation"] == self.chief and entry["reason"] == "left":
        self.chief = None
    elif kind == "commit":
      self.step = entry["step"] + 1

  def admit(self, peer: Peer) -> None:
    """Adds a replica; its predecessor of the same id is no more."""
    for old in [p for p in self.peers.values() if p.replica == peer.replica]:
      del self.peers[old.incarnation]
    self.gone.pop(peer.replica, None)
    self.peers[peer.incarnation] = peer
    self.hellos = max(self.hellos, peer.incarnation + 1)

  def dump(self) -> dict[str, Any]:
    """All of it as JSON, for one who has not read the log so far."""
    return {
      "term": self.term,
      "chief": self.chief,
      "chief_address": self.chief_address,
      "step": self.step,
      "peers": [
        [p.incarnation, p.replica, p.address] for p in self.peers.values()
      ],
      "gone": list(self.gone.items()),
      "hellos": self.hellos,
    }

  def _load(self, dumped: dict[str, Any]) -> None:
    self.term, self.chief = dumped["term"], dumped["chief"]
    self.chief_address = dumped["chief_address"]
    self.step, self.hellos = dumped["step"], dumped["hellos"]
    self.peers = {i: Peer(i, r, a) for i, r, a in dumped["peers"]}
    self.gone = dict(dumped["gone"])

  def name(self, incarnation: int | None) -> str:
    """What to call a replica in a message."""
    peer = self.peers.get(incarnation) if incarnation is not None else None
    return f"replica {peer.replica}" if peer else "a replica that is gone"
