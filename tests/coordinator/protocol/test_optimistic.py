"""Tests of attempts that members begin by themselves."""

import msgspec
import pytest

from optax_dist.coordinator.protocol import inputs as ins
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol import optimistic
from optax_dist.coordinator.protocol.config import Config
from optax_dist.coordinator.protocol.entries import (
  AttemptId,
  Joined,
  Member,
  Record,
  Term,
)
from optax_dist.coordinator.protocol.membership import View


def config(**options):
  options = {"replicas_to_aggregate": 2, "total_num_replicas": 2} | options
  return Config(
    "p0",
    0,
    "at p0",
    agreement=(),
    average=lambda parts, gradients: b"mean",
    **options,
  )


def view(members=2):
  found = View()
  found.apply(0, Record(0, (Term(0, "p0", "at p0", True, 0, 0, 0, "s"),)))
  for i in range(1, members):
    joined = Joined(Member(i, i, f"p{i}", f"at p{i}"))
    found.apply(i, Record(0, (joined,)))
  return found


PENDING = ins.Submitted(
  sequence=7,
  extends=-1,
  admission=1,
  local_step=0,
  total=1,
  finite=True,
  payload=b"",
)


def test_each_member_is_a_part_in_the_order_of_replicas():
  parts = optimistic.parts(config(), view(), 1, 0, PENDING, 1)
  assert [part.incarnation for part in parts] == [0, 1]
  # Nobody knows the numbers of others' submissions.
  assert [part.sequence for part in parts] == [0, 7]
  assert {(p.staleness, p.count, p.weight) for p in parts} == {(0, 1, 1.0)}


@pytest.mark.parametrize(
  ("why", "args"),
  [
    ("it is alone", {"view": view(1)}),
    ("more members than a step takes", {"view": view(3)}),
    ("a later step", {"step": 1}),
    ("not finite", {"pending": msgspec.structs.replace(PENDING, finite=False)}),
    ("a sum", {"pending": msgspec.structs.replace(PENDING, total=2)}),
    ("stale", {"pending": msgspec.structs.replace(PENDING, local_step=-1)}),
    ("sent inline", {"config": config(inline_bytes=4)}),
  ],
)
def test_members_that_are_not_sure_begin_nothing(why, args):
  fields = {
    "config": config(),
    "view": view(),
    "me": 0,
    "step": 0,
    "pending": PENDING,
    "count": 1,
  } | args
  assert optimistic.parts(**fields) == (), why


def test_all_members_have_begun_what_they_submitted_under_one_id():
  parts = optimistic.parts(config(), view(), 0, 0, PENDING, 1)
  seen = view()
  id_ = AttemptId(0, 0, 0, seen.membership)
  message = msg.Attempt(AttemptId(0, 0, 1, seen.membership), parts, (), None, 0)
  assert optimistic.begun(message, [id_, id_], seen, 0) == id_
  assert optimistic.begun(message, [id_, None], seen, 0) is None
  assert optimistic.begun(message, [None, None], seen, 0) is None
  later = msgspec.structs.replace(id_, term=1)
  assert optimistic.begun(message, [id_, later], seen, 0) is None
  assert optimistic.begun(message, [later, later], seen, 0) is None
  assert optimistic.begun(message, [id_, id_], seen, 1) is None
  some = msgspec.structs.replace(message, parts=parts[:1])
  assert optimistic.begun(some, [id_], seen, 0) is None
