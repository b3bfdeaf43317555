"""Nodes whose messages and store a test carries; `tests/simulation` has the rest."""

import collections
import math

import pytest

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import inputs as ins
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.config import Config
from optax_dist.coordinator.protocol.entries import (
  AttemptId,
  Committed,
  Ended,
  Part,
  Record,
  Removed,
  Term,
)
from optax_dist.coordinator.protocol.node import Node


class Cluster:
  """Nodes whose effects are executed immediately, in order."""

  def __init__(self, replicas=2, **options):
    options = {
      "replicas_to_aggregate": replicas,
      "total_num_replicas": replicas,
      "inline_bytes": 1,
      "average": lambda parts, gradients: b"mean",
    } | options
    self.store, self.now, self.down = {}, 0.0, set()
    self.silent = ()  # Kinds of messages and effects that come to nothing.
    self.did = collections.defaultdict(list)
    self.todo = collections.deque()
    self.nodes = {}
    self.options = options
    for replica in range(replicas):
      self.start(replica, f"p{replica}")

  def start(self, replica, process):
    config = Config(
      process, replica, f"at {process}", digest="s", **self.options
    )
    self.nodes[process] = Node(config)
    self.give(process, ins.Started(f"nonce of {process}"))

  def give(self, process, input_):
    self.todo.append((process, input_))
    while self.todo:
      process, input_ = self.todo.popleft()
      if process in self.nodes and process not in self.down:
        for effect in self.nodes[process].step(input_, self.now):
          self.did[process].append(effect)
          self.carry_out(process, effect)

  def carry_out(self, process, effect):
    answer = None
    if isinstance(effect, self.silent):
      return
    match effect:
      case fx.Send(peer, message):
        silent = isinstance(message, self.silent)
        if silent or peer in self.down:
          return
        self.todo.append((peer, ins.Received(process, message)))
      case fx.SendAll(peers, message):
        for peer in peers:
          self.carry_out(process, fx.Send(peer, message))
      case fx.Connect(peer) if peer in self.down:
        answer = ins.PeerLost(peer, "broken", "refused")
      case fx.Put(request, key, value, overwrite):
        free = overwrite or key not in self.store
        if free:
          self.store[key] = value
        answer = ins.PutAnswered(request, "done" if free else "conflict")
      case fx.Get(request, key):
        answer = ins.GetAnswered(request, True, self.store.get(key))
      case fx.ServeSnapshot(transfer, to, _, step):
        found = ins.SnapshotFetched(transfer, step)
        self.todo.append((to, found))
    if answer is not None:
      self.todo.append((process, answer))

  def pass_time(self, until):
    while True:
      due = {
        p: n.deadline() for p, n in self.nodes.items() if p not in self.down
      }
      process = min(due, key=due.get)
      if due[process] > until:
        self.now = until
        return
      self.now = max(self.now, due[process])
      self.give(process, ins.TimePassed())

  def submit(self, process, sequence, step, admission=1):
    gradient = bytes(self.options["inline_bytes"] or 0)
    self.give(
      process,
      ins.Submitted(sequence, -1, admission, step, 1, True, gradient, None),
    )

  def done(self, process, kind):
    return [e for e in self.did[process] if isinstance(e, kind)]

  def kill(self, process):
    self.down.add(process)
    for other in self.nodes:
      self.give(other, ins.PeerLost(process, "broken", "killed"))

  def leaders(self):
    return [p for p, n in self.nodes.items() if n.leader and p not in self.down]


def test_a_departed_replica_calls_no_new_leader(monkeypatch):
  """The old one dies when that stands in the log, and before it says so."""
  cluster = Cluster(3)
  carry_out = cluster.carry_out

  def dies(process, effect):
    carry_out(process, effect)
    match effect:
      case fx.Put(_, _, Record(_, (Removed(left=True),))):
        cluster.down |= {"p0", "p1"}

  monkeypatch.setattr(cluster, "carry_out", dies)
  cluster.give("p1", ins.LeaveWanted())
  assert cluster.down
  cluster.give("p2", ins.PeerLost("p0", "broken", "killed"))
  cluster.pass_time(60.0)
  assert cluster.leaders() == ["p2"]
  cluster.down.discard("p1")
  cluster.give("p1", ins.PeerLost("p0", "broken", "killed"))
  cluster.pass_time(70.0)
  assert cluster.done("p1", fx.Left)
  # It would join again, and be lost rather than have left.
  hellos = [
    e
    for e in cluster.done("p1", fx.Send)
    if e.peer == "p2" and isinstance(e.message, msg.Hello)
  ]
  assert hellos == []
  assert len(cluster.nodes["p2"].follower.view.members) == 1


def test_a_loss_below_the_quorum_is_reported_as_what_it_is():
  """No step has taken long, and a launcher restarts the replica by itself."""
  cluster = Cluster(2)
  cluster.kill("p1")
  (log,) = [e for e in cluster.done("p0", fx.Log) if "step 0" in e.text]
  assert log.text == (
    "step 0 needs 2 replicas and 1 can contribute; missing: 1; the step waits"
    " until they have joined again."
  )


def test_a_replica_without_an_answer_of_the_store_fails_at_its_timeout():
  node = Node(Config("p0", 0, "at p0"))
  effects = node.step(ins.Started("n"), 0.0)
  now, fail = 0.0, []
  while not fail:
    for effect in effects:
      if isinstance(effect, fx.Get):
        unknown = ins.GetAnswered(effect.request, False, None)
        effects = node.step(unknown, now)
        break
    else:
      now = node.deadline()
      effects = node.step(ins.TimePassed(), now)
    fail = [e for e in effects if isinstance(e, fx.Fail)]
  assert now == pytest.approx(300.0)
  assert fail[0].reason == (
    "Replica 0 has waited 300.0 s for the job's store, which has not answered"
    " yet."
  )


@pytest.mark.parametrize(
  "message",
  [
    msg.Recorded(99, Record(0, (Removed(0, True, "no"),))),
    msg.Serve(1, "x", "at x", 0),
    msg.Fetch(1, "x", "at x"),
    msg.Dropped(0, "stale", 1),
    msg.Asked(0, 0, 5),
    msg.Call(0),
    msg.Standing(0, False),
    msg.Canvass(0),
    msg.NotLeader(),
    msg.Refused("no"),
    msg.Welcome(0, 0, None, 0),
    msg.Done(msg.AttemptId(0, 0, 0, 0)),
  ],
  ids=lambda m: type(m).__name__,
)
def test_messages_of_strangers_change_nothing(message):
  cluster = Cluster(2)
  for process in cluster.nodes:
    cluster.give(process, ins.Received("stranger", message))
  for process in cluster.nodes:
    cluster.submit(process, 0, 0)
  for process in cluster.nodes:
    assert [e.reason for e in cluster.done(process, fx.Resolved)] == [""]


def test_an_evicted_replica_learns_at_once_that_the_run_has_ended():
  cluster = Cluster(2, inline_bytes=None)
  follower = cluster.nodes["p1"].follower
  position = follower._position
  parts = (Part(0, 0, 0, 0, 0, 1, 1.0),)
  attempt = AttemptId(0, 0, 1, 1)
  commit = Committed(attempt, parts, None, False, (), ())
  entries = (commit, Removed(1, False, "silent"), Ended(1, "enough", "", ()))
  told = msg.Recorded(position, Record(0, entries))
  cluster.give("p1", ins.Received("p0", told))
  (failed,) = cluster.done("p1", fx.Fail)
  assert failed.error == "RunFinished"


def test_a_leader_that_reads_of_a_later_term_leads_no_more_and_says_so():
  cluster = Cluster(2)
  follower = cluster.nodes["p0"].follower
  later = Term(1, "p1", "at p1", False, 1, 1, 0, "")
  told = msg.Recorded(follower._position, Record(1, (later,)))
  cluster.give("p0", ins.Received("p0", told))
  assert fx.LeadershipChanged(False) in cluster.done("p0", fx.LeadershipChanged)
  said = [effect.message for effect in cluster.done("p0", fx.SendAll)]
  assert any(isinstance(message, msg.NotLeader) for message in said)


def finished_cluster():
  """Two replicas have made a step, and finished; their processes live on."""
  cluster = Cluster(2)
  for process in ("p0", "p1"):
    cluster.submit(process, 0, 0)
  cluster.give("p0", ins.FinishWanted("enough"))
  for process in ("p0", "p1"):
    assert cluster.done(process, fx.Finished) == [fx.Finished("enough")]
  return cluster


def test_a_replica_that_joins_after_the_end_gets_the_final_state():
  cluster = finished_cluster()
  cluster.start(2, "p2")
  (restored,) = cluster.done("p2", fx.Restore)
  assert restored.step == 1
  assert cluster.done("p2", fx.Finished) == [fx.Finished("enough")]
  assert cluster.done("p2", fx.Admitted) == cluster.done("p2", fx.Fail) == []


@pytest.mark.parametrize("how", ["killed", "silent", "refuses", "transfer"])
def test_a_replica_that_joins_after_the_end_fails_without_a_final_state(how):
  cluster = finished_cluster()
  if how == "killed":
    for process in ("p0", "p1"):
      cluster.kill(process)
  elif how == "silent":
    cluster.silent = (msg.NeedsSnapshot,)
  elif how == "refuses":
    roster = cluster.nodes["p0"].leader._roster
    for member in list(roster):
      roster.remove(member.member.incarnation)
  else:
    cluster.silent = (fx.ServeSnapshot,)
  cluster.start(2, "p2")
  if how == "transfer":
    (fetch,) = cluster.done("p2", fx.FetchSnapshot)
    assert not cluster.done("p2", fx.Fail)
    failed = ins.SnapshotFailed(fetch.transfer, "nothing moves")
    cluster.give("p2", failed)
  if how == "silent":
    timeout = cluster.nodes["p2"].follower._config.deadlines.patience
    cluster.pass_time(timeout - 0.1)
    assert not cluster.done("p2", fx.Fail)
    cluster.pass_time(timeout)
  (failed,) = cluster.done("p2", fx.Fail)
  assert failed.error == "RunFinished"
  assert "(enough) at step 1" in failed.reason
  assert "replica 2 joined after the run had ended and" in failed.reason
  assert "checkpoint" in failed.reason
  assert cluster.nodes["p2"].deadline() == math.inf


@pytest.mark.parametrize(
  ("kib", "most"), [(128, 2), (100, 2), (60, 4), (10, 19)]
)
def test_a_record_has_few_large_means(kib, most):
  """Together those of many replicas may be more than a store takes."""
  cluster = Cluster(
    20,
    replicas_to_aggregate=1,
    alone=True,
    max_staleness=100,
    inline_bytes=kib << 10,
    average=lambda parts, gradients: bytes(kib << 10),
  )
  # All gradients arrive while the first one's record is being put.
  cluster.silent = fx.Put
  for process in cluster.nodes:
    cluster.submit(process, 0, 0)
  (put,) = [
    effect
    for effect in cluster.did["p0"]
    if isinstance(effect, fx.Put) and effect.key not in cluster.store
  ]
  cluster.silent = ()
  cluster.carry_out("p0", put)
  cluster.give("p0", ins.TimePassed())
  commits = [
    sum(isinstance(entry, Committed) for entry in record.entries)
    for record in cluster.store.values()
    if isinstance(record, Record)
  ]
  assert sum(commits) == 20
  assert max(commits) == most


@pytest.mark.parametrize("how", ["removed", "its connection breaks"])
def test_a_replica_that_is_evicted_repeatedly_rejoins_ever_more_rarely(how):
  """As soon as it is a member, it no longer is."""
  cluster = Cluster(3, replicas_to_aggregate=1, lower_on_loss=True)
  config = cluster.nodes["p2"]._config

  def give_up():
    """Returns after what time it is a member again."""
    began, before = cluster.now, len(cluster.done("p2", fx.Admitted))
    if how == "removed":
      leave = msg.Leave(True, "nobody reaches it")
      cluster.give("p0", ins.Received("p2", leave))
    else:
      cluster.give("p0", ins.PeerLost("p2", "broken", "cut"))
      cluster.give("p2", ins.PeerLost("p0", "broken", "cut"))
    while len(cluster.done("p2", fx.Admitted)) == before:
      assert cluster.now < began + 10 * config.deadlines.pace
      cluster.pass_time(cluster.now + 0.01)
    return cluster.now - began

  pauses = [give_up() for _ in range(12)]
  assert pauses[0] < 0.5
  tenths = [round(pause, 1) for pause in pauses]
  assert tenths == sorted(tenths)
  assert pauses[-1] >= config.deadlines.pace
  # A step of its own does not make it as good as new.
  cluster.submit("p2", 0, 0, admission=len(cluster.done("p2", fx.Admitted)))
  assert cluster.done("p2", fx.Resolved)[-1].reason == ""
  assert give_up() >= config.deadlines.pace
  # A long time without another loss does.
  cluster.pass_time(cluster.now + 12 * config.deadlines.pace)
  assert give_up() < 0.5
