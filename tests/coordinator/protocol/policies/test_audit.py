"""Tests of which slots are computed twice, and of whose gradients are wrong."""

import pytest

from optax_dist import ledger
from optax_dist.coordinator.protocol.policies import audit

# Steps of two slots of two samples, which are all audited.
DATA = ledger.Batches(16, 4, micro_batch=2, deterministic=True, audit=1.0)
FIRST, SECOND = ((0, 2),), ((2, 4),)
RIGHT, WRONG = bytes([1] * 16), bytes([2] * 16)


def audited(votes, step=0):
  """An audit to which members have sent digests, by the slot's position."""
  made = audit.Audit(DATA, step)
  for position, digests in votes.items():
    for member, digest in digests.items():
      assert not made.arrived(member, (), {position: digest})
  return made


def test_digests_travel_as_bytes():
  entries = {4: audit.NOT_FINITE, 6: RIGHT}
  work = b"".join(audit.pack(*entry) for entry in entries.items())
  assert audit.unpack(work) == entries
  with pytest.raises(ValueError, match="47 bytes of digests"):
    audit.unpack(work[:-1])


def test_two_that_agree_decide_who_is_wrong():
  votes = {0: RIGHT, 1: RIGHT}
  assert audited({0: votes, 2: votes}).verdict({*range(3)}) is None
  made = audited({0: votes, 2: {0: RIGHT, 1: WRONG}})
  assert made.verdict({*range(3)}) is None  # The third one decides.
  digests = {0: RIGHT.hex(), 1: WRONG.hex()}
  assert made.verdict({*range(2)}) == (1, digests, ())
  made.arrived(2, (), {2: WRONG})
  assert made.verdict({*range(3)}) == (1, digests | {2: WRONG.hex()}, (0,))
  made.removed(0)
  assert made.verdict({*range(2)}) is None
