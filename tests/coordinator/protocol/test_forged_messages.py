"""Whatever a process says that speaks the protocol, it says for itself alone.

Each field of each message that may come is changed to odd values, also inside of what
it holds. What the codec does not refuse goes to a coordinator with two members.
"""

import copy
import itertools
import sys
from typing import Any

import msgspec
import pytest

from optax_dist import ledger
from optax_dist.coordinator.protocol import codec, entries, messages
from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import inputs as ins
from optax_dist.coordinator.protocol.coordinator.coordinator import Coordinator
from optax_dist.coordinator.protocol.history import History
from optax_dist.coordinator.protocol.policies import policy
from optax_dist.coordinator.server import configure

_LARGEST = (1 << 63) - 1
# A gradient of 40 numbers, padded.
_NBYTES = 192
_NUMBERS = [0, 1, -1, 7, 1 << 31, -_LARGEST, _LARGEST]
_FLOATS = [0.0, -1.0, sys.float_info.max, float("nan"), float("inf")]
_TEXTS = ["", "\0", "{", "[" * 9999, "float32"]
_BYTES = [b"", b"\0" * 7, b"\xff" * _NBYTES]
_TUPLES = [(), ((0, _LARGEST),), ((5, 1),), ((0, 1), (0, 1)), (("x", 1.0),)]
ODD = [*_NUMBERS, *_FLOATS, *_TEXTS, *_BYTES, *_TUPLES, None, True]

_INLINE = {"leaves": (((40,), "float32"),)}
_SLOTS = ledger.Batches(99, 4, micro_batch=1, deterministic=True)
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
  "exchanged": ({}, {}),
  "inline": ({"inline_bytes": _NBYTES}, _INLINE),
  "leased": (
    {"inline_bytes": _NBYTES},
    _INLINE | {"data": ledger.Batches(99, 4)},
  ),
  "slots": (
    {"inline_bytes": _NBYTES, "replicas_to_aggregate": 4},
    _INLINE | {"data": _SLOTS},
  ),
  "fragments": ({}, {"fragments": entries.Fragments(2, 4)}),
}


def odd(value):
  """Other values in place of one, and of each one inside of it."""
  if isinstance(value, msgspec.Struct):
    for name in value.__struct_fields__:
      for other in odd(getattr(value, name)):
        yield codec.replace(value, **{name: other})
  elif isinstance(value, ledger.Batches | ledger.Progress):
    for name, other in itertools.product(value.__dataclass_fields__, ODD):
      changed = copy.copy(value)
      object.__setattr__(changed, name, other)
      yield changed
  elif isinstance(value, tuple):
    for index, old in enumerate(value):
      for other in odd(old):
        yield (*value[:index], other, *value[index + 1 :])
  yield from ODD


def received(message):
  """What the codec makes of it; None if it refuses it."""
  try:
    encoded = messages.MESSAGES.encode(message)
    return messages.MESSAGES.decode(encoded)
  except (codec.BadMessage, OverflowError):
    return None


class World:
  """A coordinator, its members "a" and "b", and the messages they received."""

  def __init__(self, kind: str):
    rules, others = KINDS[kind]
    numbers = {"replicas_to_aggregate": 1, "lower_on_loss": True} | rules
    self.job = entries.Job(
      (("params", "w"),),
      entries.Rules(total_num_replicas=2, **numbers),
      **others,
    )
    self.core = Coordinator(configure.config_of, History(), "a nonce")
    self.now, self.sequence = 0.0, 0
    self.told: list[tuple[str, Any]] = []
    self.gone: set[str] = set()
    self.incarnations: dict[str, int] = {}
    self.give(ins.Started())

  def give(self, input_: ins.Input) -> None:
    self.now += 0.001
    for effect in self.core.step(input_, self.now):
      match effect:
        case fx.Append(record):
          entries.RECORDS.decode(entries.RECORDS.encode(record))
        case fx.Send(peers, message):
          assert received(message) == message
          self.told += [(peer, message) for peer in peers]
          for peer in peers:
            if isinstance(message, messages.Welcome):
              self.incarnations[peer] = message.incarnation
        case fx.Disconnect(peer, _):
          self.gone.add(peer)

  def say(self, peer: str, message: Any) -> None:
    self.give(ins.Received(peer, message))

  def pass_time(self, seconds: float) -> None:
    until = self.now + seconds
    while self.now < until:
      self.now = min(until, max(self.now, self.core.deadline()))
      self.give(ins.TimePassed())

  def hello(self, replica: int, job: entries.Job | None = None) -> Any:
    start = entries.Start(0, "the same", lineage=(("run", 1),))
    return messages.Hello(
      *(job or self.job, replica, "unix:x", start, -1, -1, 0, 0, 0),
      follows=(("run", 1),),
    )

  def join(self, peer: str, hello: messages.Hello) -> None:
    self.say(peer, hello)
    if self.incarnations.get(peer, -1) >= 0:
      self.say(peer, messages.Applied(0))

  def gradient(self, peer: str) -> messages.SubmitGradient:
    """The next good one, on the samples that a member has."""
    self.sequence += 1
    own = self.incarnations.get(peer, 0)
    lease: ledger.Spans = ()
    for to, message in self.told:
      if to == peer and isinstance(message, messages.RequestGradients):
        lease = message.lease
    count = sum(stop - start for start, stop in lease)
    count = count if self.job.data and self.job.data.deterministic else 1
    payload = bytes(configure.config_of(self.job).inline_size(lease))
    step = self.core.history.step
    return messages.SubmitGradient(
      *(self.sequence, own, step, max(1, count)),
      *(True, payload),
      timings=messages.Timings(*[0.0] * 7),
      data=lease,
    )

  def take_step(self, peer: str) -> None:
    """A member answers the coordinator until a step is taken."""
    for _ in range(self.job.rules.replicas_to_aggregate):
      self.say(peer, self.gradient(peer))
      for to, message in list(self.told):
        if isinstance(message, messages.Round):
          self.say(to, messages.Done(message.round))


def valid(world):
  """What "b" may say, of each kind that there is."""
  round_ = entries.RoundId(0, 0, 1)
  gradient = world.gradient("b")
  yield gradient
  yield codec.replace(gradient, early=round_, data=((0, 4),))
  yield messages.Done(round_)
  yield messages.Failed(round_, 0, "why")
  yield messages.Applied(0)
  yield messages.NeedsSnapshot(0)
  yield messages.Leave(True, "why", "stacks")
  yield messages.Leave(False)
  yield messages.Finish("why")
  yield messages.Save()
  yield messages.SetHyperparams((("rate", 0.1),), 1)
  yield messages.Fingerprint(0, "digest")
  yield world.hello(1)
  yield messages.Meet("", 1, 0, 2, "host:1", "generation")
  yield messages.Meet("", 2, 0, 2, "host:1")
  yield messages.Meet("", 2, 0, 2, "host:1", ended="it has raised an error")
  yield messages.Host("", 0, "", "host", (0, 1), (0,), (1,), "why", ("b",))


def test_every_kind_of_message_is_tested():
  kinds = {type(message) for message in valid(World("inline"))}
  told = {messages.Meet, messages.Host}
  assert kinds == {*messages.ToCoordinator.__args__, *told}


@pytest.mark.parametrize("kind", KINDS)
def test_malformed_message_costs_only_its_sender(kind):
  before = World(kind)
  for replica, peer in enumerate("ab"):
    before.join(peer, before.hello(replica))
  for good in valid(before):
    for message in filter(None, map(received, odd(good))):
      world = copy.deepcopy(before)
      world.say("b", message)
      world.pass_time(1.0)
      world.give(ins.PeerLost("b", "broken", "it has ended"))
      history = world.core.history
      if history.ended is not None:
        # Any member may end the run.
        assert isinstance(
          message, messages.Finish | messages.Fingerprint | messages.Host
        ), message
        continue
      if kind != "fragments" and "a" not in world.gone:
        world.take_step("a")
        assert history.step, message
      elif kind != "fragments":
        # It brings another state, from which the run begins again.
        assert isinstance(message, messages.Hello), message
      world.pass_time(10.0)


def twisted(spans):
  """Samples that are as many as these, and of which some are not."""
  ((start, stop),) = spans
  middle = (start + stop) // 2
  yield ((start, middle), (start, middle))
  yield ((middle, stop), (middle, stop))
  yield (*spans, (stop, start), *spans)
  yield ((stop, start), *spans)


@pytest.mark.parametrize("kind", ["leased", "slots"])
def test_gradient_on_impossible_samples_costs_only_its_sender(kind):
  before = World(kind)
  for replica, peer in enumerate("ab"):
    before.join(peer, before.hello(replica))
  good = before.gradient("b")
  for data in twisted(good.data):
    world = copy.deepcopy(before)
    world.say("b", codec.replace(good, data=data))
    assert "b" in world.gone
    world.take_step("a")
    assert world.core.history.step == 1


@pytest.mark.parametrize("count", [1, _LARGEST])
def test_text_too_large_for_a_record_costs_only_its_sender(count):
  world = World("inline")
  for replica, peer in enumerate("ab"):
    world.join(peer, world.hello(replica))
  good = world.gradient("b")
  world.say("b", codec.replace(good, count=count, batches="7" * (3 << 20)))
  assert "b" in world.gone
  world.take_step("a")
  assert world.core.history.step == 1


def test_claim_of_half_a_slot_does_not_split_slots_of_others():
  world = World("slots")
  world.job = codec.replace(
    world.job, data=ledger.Batches(96, 8, micro_batch=2, deterministic=True)
  )
  for replica, peer in enumerate("ab"):
    world.join(peer, world.hello(replica))
  world.core = Coordinator(configure.config_of, world.core.history, "")
  world.give(ins.Started())
  for replica, (peer, lease) in enumerate((("b", ((1, 3),)), ("a", ()))):
    hello = world.hello(1 - replica)
    world.say(
      peer,
      codec.replace(
        *(hello,),
        **{"epoch": 0, "beginnings": 1, "nonce": "a nonce"},
        **{"incarnation": 1 - replica, "lease": lease},
      ),
    )
    world.say(peer, messages.Applied(0))
  leases = [
    message.lease
    for _, message in world.told
    if isinstance(message, messages.RequestGradients)
  ]
  assert all(end % 2 == 0 for lease in leases for span in lease for end in span)


def test_a_share_too_small_to_weigh_is_refused():
  """The weights of a step's gradients are relative to each other."""
  world = World("inline")
  for replica, peer in enumerate("ab"):
    world.join(peer, world.hello(replica))
  share = policy.SHARE.encode(policy.Share(sys.float_info.min / 8))
  world.say("b", codec.replace(world.gradient("b"), work=share))
  world.take_step("a")
  assert world.core.history.step == 1


def first_calls(before, calls):
  """Each of these calls as the first one, and why it is refused; None if it isn't."""
  for message in filter(None, map(received, calls)):
    world = copy.deepcopy(before)
    world.join("b", message)
    said = world.told[-1][1]
    refused = isinstance(said, messages.Refused)
    yield world, message, said.reason if refused else None


@pytest.mark.parametrize("kind", KINDS)
def test_state_that_cannot_start_a_run_is_refused_by_name(kind):
  """Of the first process that calls, whose state would be that of all."""
  before, refused = World(kind), 0
  good = before.hello(1)
  progress = ledger.Progress(8, ((2, 4),), ((5, 6),))
  start = codec.replace(good.start, progress=progress)
  calls = [codec.replace(good, start=other) for other in odd(start)]
  for world, _, refusal in first_calls(before, calls):
    if refusal is not None:
      assert "The state of replica 1 makes no run: " in refusal
      refused += 1
    world.join("a", world.hello(0))
    if kind not in ("slots", "fragments"):
      world.take_step("a")
    world.pass_time(10.0)
  assert refused > 5


@pytest.mark.parametrize("kind", KINDS)
def test_job_that_cannot_start_a_run_is_refused_by_name(kind):
  """Of the first process that calls, whose job would be that of all."""
  before, refused = World(kind), 0
  good = before.hello(1)
  calls = [codec.replace(good, job=job) for job in odd(before.job)]
  for world, message, refusal in first_calls(before, calls):
    if refusal is not None:
      assert "The job of replica 1 makes no run: " in refusal
      refused += 1
      world.join("a", world.hello(0))
      assert world.incarnations["a"] == 0
      continue
    size = message.job.rules.inline_bytes or 0
    gradient = world.gradient("b")
    for payload in (gradient.payload, bytes(min(size, 1 << 12))):
      world.say("b", codec.replace(gradient, payload=payload))
    world.pass_time(10.0)
  assert refused > 10
