"""Members average among themselves: numbers, bytes, and what fails."""

import itertools
import random
import re
import weakref

import near_transports
import numpy as np
import pytest

from optax_dist import ledger
from optax_dist.coordinator.aggregation import (
  layout as layouts,
)
from optax_dist.coordinator.aggregation import (
  means,
  nodes,
  reducer,
  scattered,
  wire_formats,
)
from optax_dist.coordinator.aggregation import (
  reduce_scatter_gather as aggregation,
)
from optax_dist.coordinator.protocol import (
  deadlines,
  effects,
  entries,
  messages,
)
from optax_dist.coordinator.transport import (
  connections,
  links,
  sending,
  shared_memory,
)
from tests.coordinator.transport import worlds

TEMPLATE = [np.zeros((300, 401), np.float32), np.zeros(7, np.float64)]


def attempt_id(number=1, step=3):
  return entries.RoundId(0, step, number, not number)


class DtypeBuffer:
  """Replicas of one process, all driven by this thread."""

  def __init__(
    self,
    members,
    readers=0,
    wire="float32",
    timeout=5.0,
    template=TEMPLATE,
    slots=None,
  ):
    self.members, self.slots = members, slots
    names = [f"p{i}" for i in range(members + readers)]
    self.late = 0.0  # Seconds by which the clocks of all are ahead.
    self.sides = [
      Side(self, i, transport, wire, timeout, template, slots)
      for i, transport in enumerate(near_transports.connected(*names))
    ]
    self.peers = tuple(
      entries.Member(i, i, side.transport.name, side.transport.address)
      for i, side in enumerate(self.sides)
    )

  def parts(self, weights=None, counts=None):
    return tuple(
      entries.Part(
        i,
        i,
        0,
        3,
        0,
        len(self.slots[i]) if self.slots else (counts or {}).get(i, 1),
        (weights or {}).get(i, 1.0),
        tuple((2 * s, 2 * s + 2) for s in self.slots[i]) if self.slots else (),
      )
      for i in range(self.members)
    )

  def begin(self, who, round_=None, **numbers):
    side = self.sides[who]
    round_ = round_ or attempt_id()
    members, readers = self.peers[: self.members], self.peers[self.members :]
    parts = self.parts(**numbers)
    if who >= self.members:
      side.all.begin(effects.Aggregate(round_, parts, members, (), None))
      return
    side.all.begin(
      effects.Aggregate(round_, parts, members, readers, who), side.gradient
    )

  def begin_all(self, round_=None, **numbers):
    for who in range(len(self.sides)):
      self.begin(who, round_, **numbers)

  def average(self, round_=None, **numbers):
    """The whole of an aggregation."""
    self.begin_all(round_, **numbers)
    self.pump()

  def pump(self, without=()):
    """Until nothing happens any more."""
    # Not every frame is an event.
    quiet = 0
    while quiet < 10:
      quiet += 1
      for index, side in enumerate(self.sides):
        if index in without:
          continue
        for event in side.transport.poll(0):
          quiet = 0
          side.all.handle(event)


class Side:
  def __init__(
    self,
    group,
    index,
    transport,
    wire,
    timeout,
    template,
    slots=None,
  ):
    self.transport = transport
    now, still = transport.now, transport.idle
    transport.now = lambda: now() + group.late
    transport.idle = lambda *array: still(*array) + group.late
    self.layout = layouts.layout(template, wire)
    rng = np.random.default_rng(index)
    self.leaves = [
      (rng.normal(size=x.shape) * 10.0**index).astype(x.dtype) for x in template
    ]
    data = None
    if slots is None:
      memory = self.transport.allocate(self.layout.nbytes)
      self._memory = weakref.ref(memory.obj)
      out = np.frombuffer(memory, np.uint8)
      self.written = means.write(self.leaves, self.layout, out)
    else:
      count = sum(map(len, slots))
      data = ledger.Batches(
        2 * count, 2 * count, micro_batch=2, deterministic=True
      )
      own = slots[index] if index < len(slots) else ()
      self.written = self.nodes(own, count)
    self.gradient = scattered.Scattered(self.written)
    self.answers = []
    self.all = aggregation.Aggregations(
      self.transport,
      reducer.Reducer(self.layout, data),
      deadlines.of(300.0, transfer_timeout=timeout),
      self.answers.append,
    )

  def nodes(self, slots, count):
    """The sum of slots, each with a gradient of its own."""
    nbytes = self.layout.nbytes
    memory = lambda: self.transport.allocate(nbytes)
    summing = nodes.Summing(self.layout, count, memory)
    total = None
    for slot in slots:
      rng = np.random.default_rng(slot)
      leaves = [rng.normal(size=x.shape).astype(x.dtype) for x in self.leaves]
      leaves[0].reshape(-1)[:9] *= np.float32(1e-40)
      part = summing.encode(slot, leaves)
      total = part if total is None else summing.add(total, part)
    return [a.data for a in total.arrays] if total else []

  def resolve(self):
    """Its gradient has an outcome."""
    self.gradient = self.written = None

  @property
  def is_idle(self):
    """Whether nobody needs the memory of its gradient any more."""
    return self._memory() is None

  def mean(self, round_=None):
    return means.read(self.layout, self.all.mean(round_ or attempt_id()))


def by_hand(sides, weights=None, count=None):
  result = []
  for leaves in zip(*(side.leaves for side in sides), strict=True):
    work = leaves[0].dtype.type
    total = leaves[0] * work((weights or {}).get(0, 1.0))
    for i, leaf in enumerate(leaves[1:], 1):
      total = total + leaf * work((weights or {}).get(i, 1.0))
    result.append(total / work(count or len(sides)))
  return result


def everyone_has(group, want, round_=None):
  """Asserts that all sides have a mean, and have reported it once."""
  round_ = round_ or attempt_id()
  for side in group.sides:
    assert side.answers == [messages.Done(round_)]
    for got, mean in zip(side.mean(round_), want, strict=True):
      np.testing.assert_array_equal(got, mean)


@pytest.mark.parametrize("members", [1, 2, 3, 5])
@pytest.mark.parametrize("readers", [0, 2])
def test_all_members_have_the_exact_mean(members, readers):
  group = DtypeBuffer(members, readers)
  group.average()
  everyone_has(group, by_hand(group.sides[:members]))


@pytest.mark.parametrize("wire", wire_formats.WIRES)
@pytest.mark.parametrize("members", [1, 2, 3, 5])
def test_a_mean_of_slots_does_not_depend_on_their_members(members, wire):
  """Members have several nodes each, and slices in several pieces."""
  template = [np.zeros((1300, 401), np.float32), np.zeros(7, np.float64)]
  count, rng = 9, random.Random(members)
  alone = DtypeBuffer(1, wire=wire, template=template, slots=[range(count)])
  alone.average()
  want = alone.sides[0].mean()
  order = rng.sample(range(count), count)
  group = DtypeBuffer(
    members,
    readers=1,
    wire=wire,
    template=template,
    slots=[order[i::members] for i in range(members)],
  )
  assert members == 1 or max(len(s.written) for s in group.sides) > 1
  group.begin_all()
  for _ in range(200):  # Parts of large arrays move without an event.
    group.pump()
  everyone_has(group, want)
  for side in group.sides:
    assert side.transport.pending() == 0


def test_a_lost_member_is_reported_as_failed_by_all():
  group = DtypeBuffer(3, readers=1)
  group.begin(0)
  group.begin(2)
  group.begin(3)
  group.pump()
  near_transports.kill(group.sides[1].transport)
  group.pump(without=[1])
  for who in (0, 2, 3):
    (answer,) = group.sides[who].answers
    assert isinstance(answer, messages.Failed)
    assert answer.failed_replica == 1


def test_member_with_an_invalid_address_is_reported_as_failed():
  group = DtypeBuffer(2)
  group.peers = (group.peers[0], entries.Member(1, 1, "gone", "node-1\n:29400"))
  group.begin(0)
  group.pump()
  (answer,) = group.sides[0].answers
  assert (type(answer), answer.failed_replica) == (messages.Failed, 1)


def test_a_failure_does_not_blame_waiting_members():
  """A failed member keeps its transfers until the coordinator has decided."""
  group = DtypeBuffer(3)
  group.begin(0)
  group.begin(2)
  group.pump()
  near_transports.kill(group.sides[1].transport)
  group.pump(without=[1, 2])
  # Now the first has failed; the other hears of both.
  group.pump(without=[1])
  assert [a.failed_replica for a in group.sides[2].answers] == [1]


def test_a_silent_member_times_out_and_is_named():
  group = DtypeBuffer(3, timeout=30.0)
  group.begin(0)
  group.begin(2)
  group.pump()
  group.late = 70.0
  for who in (0, 2):
    side = group.sides[who]
    side.all.check()
    (answer,) = side.answers
    assert answer.failed_replica == 1
    assert re.search(
      r"no byte of its gradient came for \d+\.\d s", answer.reason
    )


def test_round_waits_for_members_that_begin_late():
  group = DtypeBuffer(2, timeout=30.0)
  group.begin(0, attempt_id(0))
  group.pump()
  group.late = 70.0
  group.sides[0].all.check()
  group.begin(1, attempt_id(0))
  group.pump()
  assert all(isinstance(side.answers[0], messages.Done) for side in group.sides)


@pytest.fixture
def in_pieces(monkeypatch):
  """As between hosts, with slices of many megabytes."""
  monkeypatch.setattr(shared_memory, "LEAST", 1 << 40)
  monkeypatch.setattr(sending, "PIECE", 16 << 10)
  monkeypatch.setattr(connections, "_TURN", 20 << 10)
  monkeypatch.setattr(links, "_TURN", 20 << 10)
  monkeypatch.setattr(aggregation, "PIECE", 40 << 10)


@pytest.mark.usefixtures("in_pieces")
def test_slow_transfer_of_gradients_does_not_time_out():
  group = DtypeBuffer(2, timeout=0.1)
  group.begin(0)
  group.pump()
  side, now = group.sides[0], group.sides[0].transport.now()
  pieces = range(len(side.all.rounds[attempt_id()].own))
  numbers = [
    aggregation.transfer_id("part", attempt_id(), 1, p) for p in pieces
  ]
  idle = lambda peer, transfer: 0.01 if transfer in numbers else now
  side.transport.idle = idle
  side.transport.now = lambda: now
  for _ in range(100):
    now += 0.05
    side.all.check()
    assert side.answers == []
  # The other one has all gradients now, and sends no mean.
  group.sides[1].all._average = lambda round_, piece: None
  group.begin(1)
  group.pump()
  now += 0.14
  side.all.check()
  assert side.answers == []
  now += 0.02
  side.all.check()
  (answer,) = side.answers
  assert answer.failed_replica == 1
  assert "no byte of its slice of the mean came for 0.2 s" in answer.reason


@pytest.mark.usefixtures("in_pieces")
def test_a_member_that_is_lost_between_two_pieces_is_named():
  group = DtypeBuffer(2)
  group.begin_all()
  first, second = group.sides
  number = aggregation.transfer_id("part", attempt_id(), 1, 0)
  while not worlds.received(first.transport, "p1", number):
    second.transport.poll(0)
    for event in first.transport.poll(0):
      first.all.handle(event)
  assert not first.answers
  near_transports.kill(second.transport)
  group.pump(without=[1])
  (answer,) = first.answers
  assert (type(answer), answer.failed_replica) == (messages.Failed, 1)
  first.resolve()
  first.all.drop(attempt_id())
  assert first.is_idle


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize(("members", "readers"), [(1, 0), (2, 0), (3, 2)])
def test_scattered_gradient_is_averaged_to_the_bit(
  request, far, members, readers
):
  """Its parts end anywhere, and some are empty."""
  if far:
    request.getfixturevalue("in_pieces")
  group = DtypeBuffer(members, readers)
  for index, side in enumerate(group.sides[:members]):
    (whole,) = side.written
    ends = sorted({0, 64, *range(0, whole.nbytes, 30_000 + 10_000 * index)})
    parts = [whole[a:b] for a, b in itertools.pairwise([*ends, whole.nbytes])]
    side.gradient = scattered.Scattered([whole[:0], *parts])
    del whole, parts
  group.average()
  everyone_has(group, by_hand(group.sides[:members]))
  for side in group.sides:
    side.resolve()
    side.all.drop(attempt_id())
  group.pump()
  assert all(side.is_idle for side in group.sides[:members])
  assert all(side.transport.pending() == 0 for side in group.sides)
