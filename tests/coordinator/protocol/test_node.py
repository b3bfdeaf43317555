"""Whole processes, without a network: messages and store are carried by hand."""

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
  Joined,
  Member,
  Part,
  Record,
  Removed,
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
    # Pairs of sender and receiver, "store" among them, of which nothing comes.
    self.cuts = set()
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
    asks = isinstance(effect, fx.Get | fx.Put)
    if isinstance(effect, self.silent) or (
      asks and (process, "store") in self.cuts
    ):
      return
    match effect:
      case fx.Send(peer, message):
        silent = isinstance(message, self.silent)
        if silent or peer in self.down or (process, peer) in self.cuts:
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
    self.give(
      process,
      ins.Submitted(sequence, -1, admission, step, 1, True, b"g", None),
    )

  def done(self, process, kind):
    return [e for e in self.did[process] if isinstance(e, kind)]

  def kill(self, process):
    self.down.add(process)
    for other in self.nodes:
      self.give(other, ins.PeerLost(process, "broken", "killed"))

  def leaders(self):
    return [p for p, n in self.nodes.items() if n.leader and p not in self.down]


def test_they_start_together_and_make_steps():
  cluster = Cluster(3)
  assert cluster.leaders() == ["p0"]
  for step in range(3):
    for process in cluster.nodes:
      cluster.submit(process, step, step)
  for process in cluster.nodes:
    assert [e.step for e in cluster.done(process, fx.Publish)] == [1, 2, 3]
    assert [e.reason for e in cluster.done(process, fx.Resolved)] == [""] * 3
  nonces = {e.nonce for p in cluster.nodes for e in cluster.done(p, fx.UseRun)}
  assert nonces == {"nonce of p0"}


def test_a_node_never_sends_to_itself():
  cluster = Cluster(3)
  for process in cluster.nodes:
    assert all(e.peer != process for e in cluster.done(process, fx.Send))
    assert all(
      process not in e.peers for e in cluster.done(process, fx.SendAll)
    )


def test_when_the_leader_dies_the_next_goes_on_and_nothing_is_lost():
  cluster = Cluster(3, replicas_to_aggregate=2, lower_on_loss=True)
  cluster.submit("p1", 0, 0)
  cluster.kill("p0")
  cluster.pass_time(1.0)
  assert cluster.leaders() == ["p1"]
  cluster.submit("p2", 0, 0)
  for process in ("p1", "p2"):
    (outcome,) = cluster.done(process, fx.Resolved)
    assert (outcome.reason, outcome.members) == ("", (1, 2))


def test_the_dead_one_s_id_can_join_again():
  cluster = Cluster(2, lower_on_loss=True)
  cluster.kill("p1")
  cluster.start(1, "p9")
  (admitted,) = cluster.done("p9", fx.Admitted)
  assert admitted.incarnation == 2
  cluster.submit("p0", 0, 0)
  cluster.submit("p9", 0, 0)
  assert cluster.done("p9", fx.Publish)


def test_a_finish_reaches_all():
  cluster = Cluster(3)
  cluster.give("p2", ins.FinishWanted("enough"))
  for process in cluster.nodes:
    assert cluster.done(process, fx.Finished) == [fx.Finished(0, "enough")]


def test_all_save_the_same_step():
  cluster = Cluster(2)
  cluster.give("p1", ins.SaveWanted())
  for step in range(2):
    for process in cluster.nodes:
      cluster.submit(process, step, step)
  for process in cluster.nodes:
    assert [e.save for e in cluster.done(process, fx.Publish)] == [True, False]


def test_who_leaves_is_let_go_and_the_others_go_on():
  cluster = Cluster(2)
  cluster.give("p0", ins.LeaveWanted())
  assert cluster.done("p0", fx.Left)
  cluster.pass_time(1.0)
  assert cluster.leaders() == ["p1"]
  cluster.submit("p1", 0, 0)
  assert cluster.done("p1", fx.Publish)


def test_who_has_left_calls_no_new_leader(monkeypatch):
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


def test_who_comes_again_before_it_reads_that_it_has_left_is_no_member():
  """If readmitted it would be lost, and the others would wait for it."""
  cluster = Cluster(2)
  cluster.silent = (msg.Recorded,)
  cluster.give("p1", ins.LeaveWanted())
  members = cluster.nodes["p0"].follower.view.members
  assert len(members) == 1
  # It calls the leader, and reads in the store of its leave before the answer.
  cluster.silent = (msg.Recorded, msg.Welcome)
  cluster.give("p1", ins.PeerLost("p0", "broken", "reset"))
  cluster.pass_time(cluster.now + 60.0)
  assert cluster.done("p1", fx.Left)
  cluster.silent = ()
  cluster.give("p0", ins.PeerLost("p1", "left", "it has ended"))
  assert len(cluster.nodes["p0"].follower.view.members) == 1
  cluster.submit("p0", 0, 0)
  assert cluster.done("p0", fx.Publish)


def test_a_loss_below_the_quorum_is_reported_as_what_it_is():
  """No step has taken long, and a launcher restarts the replica by itself."""
  cluster = Cluster(2)
  cluster.kill("p1")
  (log,) = [e for e in cluster.done("p0", fx.Log) if "step 0" in e.text]
  assert log.text == (
    "step 0 needs 2 replicas and 1 can contribute; missing: 1; the step waits"
    " until they have joined again."
  )


def test_a_submission_of_an_old_admission_is_lost():
  cluster = Cluster(2)
  cluster.submit("p1", 0, 0, admission=0)
  (outcome,) = cluster.done("p1", fx.Resolved)
  assert outcome.reason == "lost"


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
    msg.Fetch(1, "x", "at x", 0),
    msg.Dropped(0, "stale", 1),
    msg.Asked(0, 5),
    msg.Call(0),
    msg.Standing(0, False),
    msg.Canvass(0),
    msg.NotLeader("no"),
    msg.Refused("no"),
    msg.Welcome(0, 0, None, 0),
    msg.Done(msg.AttemptId(0, 0, 0, 0)),
  ],
  ids=lambda m: type(m).__name__,
)
def test_a_stranger_s_word_counts_for_nothing(message):
  cluster = Cluster(2)
  for process in cluster.nodes:
    cluster.give(process, ins.Received("stranger", message))
  for process in cluster.nodes:
    cluster.submit(process, 0, 0)
  for process in cluster.nodes:
    assert [e.reason for e in cluster.done(process, fx.Resolved)] == [""]


def test_one_that_called_the_new_leader_too_early_calls_again():
  """It has read the `Term` itself, so the leader's message changes nothing."""
  cluster = Cluster(3)
  cluster.kill("p0")
  (leader,) = cluster.leaders()
  (other,) = {"p1", "p2"} - {leader}
  position = cluster.nodes[leader].leader._publisher.first
  told = msg.Recorded(position, cluster.store[f"log/{position}"])
  node = cluster.nodes[other]
  node.step(ins.Received(leader, msg.NotLeader("it is not, as yet")), 0.0)
  effects = node.step(ins.Received(leader, told), 0.0)
  called = [e.peer for e in effects if isinstance(e, fx.Send)]
  assert called == [leader]


def test_a_new_leader_tells_what_its_members_can_t_read_in_the_store():
  cluster = Cluster(3, replicas_to_aggregate=2)
  cluster.pass_time(0.1)
  # The last record of the first leader does not come, nor can it be read.
  cluster.cuts = {("p0", "p2"), ("p2", "store")}
  for process in ("p0", "p1"):
    cluster.submit(process, 0, 0)
  cluster.kill("p0")
  assert cluster.leaders() == ["p1"]
  cluster.pass_time(20.0)
  records = [r for key, r in cluster.store.items() if key.startswith("log/")]
  removed = [e for r in records for e in r.entries if isinstance(e, Removed)]
  assert [e.incarnation for e in removed] == [0]
  for process in ("p1", "p2"):
    cluster.submit(process, 1, 1)
  assert cluster.done("p2", fx.Publish)[-1].step == 2


def test_who_was_removed_is_told_at_once_that_the_run_has_ended():
  cluster = Cluster(2, inline_bytes=None)
  follower = cluster.nodes["p1"].follower
  position = follower._position
  parts = (Part(0, 0, 0, 0, 0, 1, 1.0),)
  attempt = AttemptId(0, 0, 1, 1)
  commit = Committed(attempt, parts, (), None, False, (), ())
  entries = (commit, Removed(1, False, "silent"), Ended(1, "enough", "", ()))
  told = msg.Recorded(position, Record(0, entries))
  cluster.give("p1", ins.Received("p0", told))
  (failed,) = cluster.done("p1", fx.Fail)
  assert failed.error == "RunFinished"


def finished_cluster():
  """Two replicas have made a step, and finished; their processes live on."""
  cluster = Cluster(2)
  for process in ("p0", "p1"):
    cluster.submit(process, 0, 0)
  cluster.give("p0", ins.FinishWanted("enough"))
  for process in ("p0", "p1"):
    assert cluster.done(process, fx.Finished) == [fx.Finished(1, "enough")]
  return cluster


def test_who_comes_after_the_end_gets_the_final_state():
  cluster = finished_cluster()
  cluster.start(2, "p2")
  (restored,) = cluster.done("p2", fx.Restore)
  assert restored.step == 1
  assert cluster.done("p2", fx.Finished) == [fx.Finished(1, "enough")]
  assert cluster.done("p2", fx.Admitted) == cluster.done("p2", fx.Fail) == []


@pytest.mark.parametrize("how", ["killed", "silent", "refuses", "transfer"])
def test_who_comes_after_the_end_is_told_if_the_final_state_is_gone(how):
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


@pytest.mark.parametrize("lives", [False, True])
def test_a_request_of_an_earlier_process_that_comes_late_displaces_nobody(
  lives,
):
  """A dead process's request to join is read after its successor was given up."""
  cluster = Cluster(2)
  cluster.silent = (msg.Hello,)  # What it sends now comes later.
  cluster.give("p1", ins.PeerLost("p0", "broken", "reset"))
  cluster.give("p0", ins.PeerLost("p1", "broken", "reset"))
  late = msg.Hello(msg.PROTOCOL_VERSION, (), 1, "at old", -1, -1, 0, False, 1)
  cluster.give("p0", ins.Received("old", late))
  if not lives:
    cluster.give("p0", ins.PeerLost("old", "broken", "killed"))
  cluster.pass_time(cluster.now + 2.0)
  cluster.silent = ()
  cluster.pass_time(cluster.now + 20.0)
  failed = cluster.done("p1", fx.Fail)
  if lives:
    (fail,) = failed
    assert "Another process has joined as replica 1" in fail.reason
  else:
    assert failed == []
    assert len(cluster.nodes["p0"].follower.view.members) == 2


def test_who_leaves_waits_until_a_dead_leader_must_have_been_noticed():
  cluster = Cluster(3)
  config = cluster.nodes["p0"].follower._config
  cluster.down.add("p0")
  cluster.give("p2", ins.LeaveWanted())
  cluster.pass_time(config.deadlines.silence)
  assert not cluster.done("p2", fx.Left)
  for process in ("p1", "p2"):
    cluster.give(process, ins.PeerLost("p0", "silent", "nothing heard"))
  cluster.pass_time(cluster.now + 10.0)
  assert cluster.done("p2", fx.Left)
  # As one that has left, and not as one that is lost.
  assert cluster.nodes["p1"].follower.view.departed[2] is True


def test_a_step_in_the_same_record_as_its_membership_needs_no_snapshot():
  """The leader may have died since: nobody else might have the state."""
  cluster = Cluster(2, replicas_to_aggregate=1)
  joined = Joined(Member(2, 1, "p1", "at p1"))
  removed = Removed(1, False, "its connection was lost: reset")
  parts = (Part(0, 0, 0, 0, 0, 1, 1.0),)
  attempt = AttemptId(0, 0, 1, 0)
  commit = Committed(attempt, parts, (), b"mean", False, (), ())
  position = len([key for key in cluster.store if key.startswith("log/")])
  cluster.store[f"log/{position}"] = Record(0, (removed, joined, commit))
  cluster.kill("p0")
  cluster.pass_time(60.0)
  assert cluster.leaders() == ["p1"]
  assert cluster.done("p1", fx.Apply)
  assert [e.step for e in cluster.done("p1", fx.Publish)] == [1]


@pytest.mark.parametrize("how", ["removed", "its connection breaks"])
def test_who_is_given_up_again_and_again_joins_ever_more_rarely(how):
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
  # A step of its own makes it as good as new.
  cluster.submit("p2", 0, 0, admission=len(cluster.done("p2", fx.Admitted)))
  assert cluster.done("p2", fx.Resolved)[-1].reason == ""
  assert give_up() < 0.5
  # So does a long time without another loss.
  assert [give_up() for _ in range(8)][-1] > 0.5
  cluster.pass_time(cluster.now + 12 * config.deadlines.pace)
  assert give_up() < 0.5


def test_who_is_given_up_after_its_part_of_a_step_is_told_lost():
  """Yet the step counts with its gradient: `lost` is "not known to count"."""
  cluster = Cluster(3, inline_bytes=None, replicas_to_aggregate=2)
  submitted = ins.Submitted(0, -1, 1, 0, 1, True, b"", None)
  for process in ("p1", "p2"):
    cluster.give(process, submitted)
  (aggregate,) = cluster.done("p1", fx.Aggregate)
  done = ins.Aggregated(aggregate.attempt)
  cluster.give("p1", done)
  # Its leader gives it up, and hears that the other has done its part before
  # that one knows.
  cluster.silent = (msg.Recorded,)
  cluster.give("p0", ins.Received("p1", msg.Leave(True, "nobody reaches it")))
  removed = cluster.done("p0", fx.SendAll)[-1].message
  cluster.give("p1", ins.Received("p0", removed))
  cluster.give("p2", done)
  (commit,) = [
    entry
    for record in cluster.store.values()
    if isinstance(record, Record)
    for entry in record.entries
    if isinstance(entry, Committed)
  ]
  assert [part.replica for part in commit.parts] == [1, 2]
  (outcome,) = cluster.done("p1", fx.Resolved)
  assert outcome.reason == "lost"
