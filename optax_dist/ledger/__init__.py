"""Which replica computes on which samples, and which are in committed steps.

A step of k of N gradients drops some, replicas die, others join; no sample may
be lost or counted twice. A ledger leases samples along with the quorum's
tokens: committed samples are done, and samples of a dropped gradient or of a
lost replica return to the pool. It is pure, like `optax_dist.quorum`: no jax,
no clock, no I/O. `step(state, event)` returns the next state and the leases.
The coordinator runs it; see docs/data.md.

In each epoch each sample is in exactly one committed step; `report` lists the
exceptions.

Example:
  Two replicas share batches of four; the second is lost, and the first one
  gets its samples.

  >>> from optax_dist import ledger
  >>> data = ledger.Batches(num_samples=8, global_batch=4, shuffle=False)
  >>> state = ledger.init(data, gradients_per_step=2)
  >>> state, leases = ledger.step(state, ledger.Ask("a"))
  >>> leases
  (Lease(holder='a', spans=((0, 2),)),)
  >>> state, leases = ledger.step(state, ledger.Ask("b"))
  >>> leases
  (Lease(holder='b', spans=((2, 4),)),)
  >>> state, _ = ledger.step(state, ledger.Accept("a", ((0, 2),)))
  >>> state, _ = ledger.step(state, ledger.HolderLost("b"))
  >>> state, _ = ledger.step(state, ledger.Members({"a": "a"}, need=1))
  >>> state, _ = ledger.step(state, ledger.Commit((("a", ((0, 2),)),)))
  >>> state, leases = ledger.step(state, ledger.Ask("a"))
  >>> leases
  (Lease(holder='a', spans=((2, 4),)),)
  >>> ledger.report(data, state.progress)[0].open
  (2, 3, 4, 5, 6, 7)
"""

from typing import TYPE_CHECKING

from optax_dist._internal import lazy

if TYPE_CHECKING:
  from optax_dist.ledger.batches import Batches
  from optax_dist.ledger.events import (
    Accept,
    Ask,
    Claim,
    Commit,
    Copy,
    Drop,
    Event,
    Holder,
    HolderLost,
    Lease,
    Members,
    Swap,
  )
  from optax_dist.ledger.not_finite import are_bad, is_blocked, swap
  from optax_dist.ledger.progress import (
    NOTHING_DONE,
    EpochReport,
    Progress,
    report,
  )
  from optax_dist.ledger.rules import fits, step
  from optax_dist.ledger.sources import read
  from optax_dist.ledger.spans import Span, Spans
  from optax_dist.ledger.state import Held, State, init
else:
  __getattr__, __dir__ = lazy.names(__name__)

__all__ = [
  "NOTHING_DONE",
  "Accept",
  "Ask",
  "Batches",
  "Claim",
  "Commit",
  "Copy",
  "Drop",
  "EpochReport",
  "Event",
  "Held",
  "Holder",
  "HolderLost",
  "Lease",
  "Members",
  "Progress",
  "Span",
  "Spans",
  "State",
  "Swap",
  "are_bad",
  "fits",
  "init",
  "is_blocked",
  "read",
  "report",
  "step",
  "swap",
]
