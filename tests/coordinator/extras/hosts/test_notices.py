"""What a launcher tells of several replicas and of several starts of each."""

from optax_dist.coordinator.extras.hosts.notices import (
  CODEC,
  Notice,
  Part,
  Plan,
)


def test_a_part_is_that_of_one_decision_alone():
  """An earlier start's end must not be taken for the end of this one."""
  parts = tuple(
    Part(replica, decider, start, words=f"{replica} {decider} {start}")
    for replica in (0, 1)
    for decider in ("a", "b")
    for start in (0, 1)
  )
  notice = CODEC.decode(CODEC.encode(Notice("c", parts=parts)))
  for part in parts:
    assert notice.part(part.replica, part.decider, part.start) == part
  assert notice.part(0, "a", 2) is None
  assert notice.part(0, "c", 0) is None


def test_a_plan_is_that_of_its_replica():
  plans = (Plan(3, 0, "h:1", ("a",)), Plan(1, 2, "h:2", ("a", "b")))
  notice = Notice("a", plans=plans)
  assert [notice.plan(r) for r in (1, 2, 3)] == [plans[1], None, plans[0]]
