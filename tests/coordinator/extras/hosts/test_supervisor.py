"""Tests of the launchers' decisions about replicas on several hosts."""

import random

import pytest

from optax_dist.coordinator.extras.hosts import notices, peers
from optax_dist.coordinator.extras.hosts.nodes import Share
from optax_dist.coordinator.extras.hosts.notices import Notice
from optax_dist.coordinator.extras.hosts.peers import Peers
from optax_dist.coordinator.extras.hosts.supervisor import (
  HostSupervisor,
  LauncherEnds,
  NoticeRead,
)
from optax_dist.coordinator.launch import supervisor as sup
from optax_dist.coordinator.protocol import codec

_MEET, _SILENCE = 30.0, 6.0


@pytest.fixture(autouse=True)
def _short(monkeypatch):
  monkeypatch.setattr(peers, "_MEET", _MEET)


def _supervisor(host, name="", hosts=2, now=0.0, **policy):
  share = Share(range(1), range(host, host + 1), range(hosts))
  own = Notice(name or f"launcher {host}")
  made = HostSupervisor(
    share,
    sup.Policy(**({"whole": False} | policy)),
    Peers(host, own, range(hosts), now, _SILENCE),
    lambda: f"h{host}:1",
  )
  assert made.start(now) == []
  return made


class _Hosts:
  """Two hosts that read each other's notices when told to."""

  def __init__(self, **policy):
    self.policy = policy
    self.machines = [_supervisor(host, **policy) for host in (0, 1)]
    self.beats = [0, 0]
    self.said = []

  def tell(self, host, given, now):
    effects = self.machines[host].step(given, now)
    self.said = [e.line for e in effects if isinstance(e, sup.Say)]
    return [e for e in effects if not isinstance(e, sup.Say)]

  def tick(self, host, now):
    return self.tell(host, sup.Tick(), now)

  def written(self, host):
    """What a host writes, as others read it."""
    self.beats[host] += 1
    assert self.machines[host].writes
    notice = codec.replace(self.machines[host].notice, beat=self.beats[host])
    again = notices.CODEC.decode(notices.CODEC.encode(notice))
    assert again == notice
    return again

  def read(self, reader, now):
    """One host writes its notice, and the other one reads it."""
    return self.tell(
      reader, NoticeRead(1 - reader, self.written(1 - reader)), now
    )

  def find_nothing(self, host, now):
    """A host reads that no launcher has written a notice."""
    for other in (0, 1):
      assert self.tell(host, NoticeRead(other, None), now) == []

  def start(self, now=1.0):
    """Both run the replica."""
    for host in (0, 1):
      self.find_nothing(host, now)
    assert self.read(0, now) == [_begin(0)]
    assert self.read(1, now) == [_begin(0)]

  def leave(self, now):
    """The processes on both hosts say that the replica has left."""
    for host in (0, 1):
      for given in (sup.Joined(0), sup.Left(0)):
        assert self.tell(host, given, now) == []

  def stage(self, host):
    return self.machines[host].notice.part.stage


def _begin(start):
  """All meet at the address of the first host."""
  return sup.StartReplica(0, start, "h0:1")


_KILL = sup.KillReplica(0)


def test_a_replica_starts_once_all_hosts_are_ready_and_ends_well():
  two = _Hosts()
  two.start()
  two.leave(4.0)
  assert two.tell(0, sup.ReplicaEnded(0, 0), 5.0) == []
  assert two.read(1, 5.1) == []  # It waits for its own.
  assert two.tell(1, sup.ReplicaEnded(0, 0), 6.0) == [sup.JobEnded(0)]
  assert two.read(0, 6.1) == [sup.JobEnded(0)]


def test_a_process_that_dies_on_any_host_ends_the_replica_on_all():
  two = _Hosts()
  two.start()
  # On the other host ...
  killed = sup.ReplicaEnded(0, -15, "was killed", "a tail", "process 1")
  assert two.tell(1, killed, 5.0) == []
  assert two.read(0, 5.1) == [_KILL]
  assert two.said == [
    "replica 0 ended, because process 1 on host 1 was killed",
    "replica 0 starts again (restart 1 of 10)",
  ]
  assert two.tick(0, 5.2) == [_begin(1)]
  assert two.read(1, 5.2) == [_begin(1)]
  # ... and on the first one, which pauses before it is ready again.
  assert two.tell(0, sup.ReplicaEnded(0, 3, "failed", "", "process 0"), 9) == []
  assert two.read(1, 9.2) == [_KILL]
  assert two.said == ["replica 0 ended, because process 0 on host 0 failed"]
  assert two.tick(0, 10.0) == []
  assert two.tick(1, 10.2) == []
  assert two.read(1, 10.3) == [_begin(2)]
  assert two.read(0, 10.4) == [_begin(2)]


def test_a_failure_on_one_host_undoes_the_good_end_on_another():
  two = _Hosts(restarts=0)
  two.start()
  assert two.tell(0, sup.ReplicaEnded(0, 0), 5.0) == []
  two.tell(1, sup.ReplicaEnded(0, 7, "failed", "", "process 1"), 5.1)
  two.read(0, 5.2)
  [given_up] = two.tick(0, 9.0)
  assert given_up.code == 7
  assert "because process 1 on host 1 failed" in given_up.reason


def test_a_host_that_does_not_come_is_named():
  one = _supervisor(0, hosts=3)
  one.step(NoticeRead(1, None), 0.0)
  one.step(NoticeRead(1, Notice("b", beat=1)), _MEET - 1.0)
  assert one.step(sup.Tick(), _MEET - 0.1) == []
  [given_up] = one.step(sup.Tick(), _MEET)
  assert "the launcher of host 2 has not connected" in given_up.reason
  assert one.notice.part.stage == notices.Stage.ABSENT


def test_a_replica_that_one_host_abandons_starts_on_none():
  two = _Hosts()
  two.machines[1] = _supervisor(1, restarts=0)
  two.start()
  failed = sup.ReplicaEnded(0, 3, "failed", "", "process 1")
  assert two.tell(1, failed, 2.0) == []
  [given_up] = two.tick(1, 3.0)  # No restart is left there.
  assert given_up.code == 3
  assert two.read(0, 3.1)[0] == _KILL
  [given_up] = two.tick(0, 4.1)
  assert "it was abandoned" in given_up.reason


def test_a_host_that_is_silent_ends_the_replica_and_may_come_back():
  two = _Hosts()
  two.start()
  assert two.read(0, 5.0) == []
  assert two.tick(0, 5.0 + _SILENCE) == []
  [kill] = two.tick(0, 5.1 + _SILENCE)
  assert kill == _KILL
  assert "host 1 was silent for 6 s" in two.said[0]
  # It is ready again, and waits; the host comes back in time.
  assert two.tick(0, 4.9 + 2 * _SILENCE) == []
  assert two.read(0, 5.0 + 2 * _SILENCE) == []
  assert two.read(1, 5.1 + 2 * _SILENCE)[0] == _KILL
  assert two.tick(1, 6.2 + 2 * _SILENCE) == [_begin(1)]
  now = 6.3 + 2 * _SILENCE
  assert two.read(0, now) == [_begin(1)]
  # And one that does not come back is given up.
  assert two.tick(0, now + _SILENCE + 0.1) == [_KILL]
  assert two.tick(0, now + 2 * _SILENCE) == []
  [given_up] = two.tick(0, now + 2 * _SILENCE + 0.1)
  assert "host 1 was silent for 12 s" in given_up.reason


def test_a_host_is_waited_for_from_its_last_notice_on():
  """Not from when the others were ready, which may be long before."""
  two = _Hosts()
  two.start()
  two.read(0, 5.0)
  two.tell(0, sup.ReplicaEnded(0, -15, "was killed", "", "process 0"), 5.0)
  two.beats[1] += 1
  for now in range(6, 20):  # It is alive, and does not become ready.
    alive = codec.replace(two.machines[1].notice, beat=now)
    assert two.tell(0, NoticeRead(1, alive), now) == []
  assert two.tick(0, 19.0 + 2 * _SILENCE) == []
  assert len(two.tick(0, 19.1 + 2 * _SILENCE)) == 1


def test_what_an_earlier_launcher_has_left_is_not_taken_for_life():
  ready = notices.Part(0, notices.Stage.READY)
  old = Notice("old", beat=70, part=ready)
  one = _supervisor(0)
  for now in (1.0, 1.2):
    assert one.step(NoticeRead(0, None), now) == []
    assert one.step(NoticeRead(1, old), now) == []
  new = Notice("new", beat=1, part=ready)
  assert one.step(NoticeRead(1, new), 2.0) == [_begin(0)]


@pytest.mark.parametrize("host", [0, 1])
def test_a_launcher_that_was_started_anew_has_none_of_the_processes(host):
  two = _Hosts()
  two.start()
  left, other = two.written(host), two.written(1 - host)
  two.machines[host] = _supervisor(host, "another", now=4.0)
  two.tell(host, NoticeRead(1 - host, other), 4.0)
  # It writes nothing before it knows that the earlier launcher has ended.
  for now in (4.0, 4.5, 5.0, 5.4):
    assert two.tell(host, NoticeRead(host, left), now) == []
    assert not two.machines[host].writes
  assert two.tell(host, NoticeRead(host, left), 5.5) == []
  assert two.read(host, 5.6) == []  # What runs is with the one before.
  assert two.read(1 - host, 5.7) == [_KILL]
  assert f"host {host} was started anew" in two.said[0]
  # It counts its starts on from there.
  assert two.tick(1 - host, 6.7) == [_begin(1)]
  assert two.read(host, 6.8) == [_begin(1)]


def test_a_launcher_with_a_new_store_ends_what_still_runs():
  """Host 0 has lost its store, and with it what others had written."""
  two = _Hosts()
  two.start()
  two.machines[0] = _supervisor(0, "another", now=4.0)
  two.tell(0, NoticeRead(0, None), 4.0)
  assert two.tell(0, NoticeRead(1, two.written(1)), 4.1) == []
  assert two.read(1, 4.2) == [_KILL]
  assert two.tick(1, 5.2) == [_begin(1)]


def test_when_one_host_knows_that_the_run_is_over_all_do():
  two = _Hosts()
  two.start()
  # The second host has lost its processes; they will not be missed.
  killed = sup.ReplicaEnded(0, -15, "was killed", "", "process 1")
  two.tell(1, killed, 5.0)
  assert two.tell(0, sup.RunOver(), 5.0) == []
  assert two.read(1, 5.1) == [sup.JobEnded(0)]
  # One that has not joined is ended, and is missed by none.
  two = _Hosts()
  two.start()
  two.tell(0, sup.RunOver(), 5.0)
  assert two.tick(0, 6.0) == [_KILL, sup.JobEnded(0)]
  two.tell(1, sup.Joined(0), 6.0)
  assert two.read(1, 6.1) == []
  assert two.tick(1, 8.0) == []


def test_what_is_left_on_other_hosts_ends_by_itself():
  two = _Hosts()
  two.start()
  for host in (0, 1):
    two.tell(host, sup.Joined(0), 4.0)
  two.tell(0, sup.RunOver(), 5.0)
  assert two.tell(0, sup.ReplicaEnded(0, 0), 5.1) == [sup.JobEnded(0)]
  assert two.read(1, 5.2) == []
  assert two.tell(1, sup.ReplicaEnded(0, 0), 5.3) == [sup.JobEnded(0)]


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_host_that_is_to_end_has_the_replica_leave(stopped):
  two = _Hosts()
  two.start()
  assert two.tell(stopped, sup.LauncherStops(15), 5.0) == []
  assert two.read(1 - stopped, 5.1) == [sup.SignalReplica(0, 15)]
  assert two.read(1 - stopped, 5.2) == []  # Once.
  # Its own processes have been told already.
  assert two.read(stopped, 5.3) == []
  # It does not wait for the others.
  ended = sup.ReplicaEnded(0, 0)
  assert two.tell(stopped, ended, 6.0) == [sup.JobEnded(143)]
  assert two.read(1 - stopped, 6.1) == []
  assert two.tell(1 - stopped, ended, 6.2) == [sup.JobEnded(0)]


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_host_that_waits_for_others_can_be_stopped(stopped):
  one = _supervisor(stopped)
  assert one.step(sup.LauncherStops(2), 1.0) == [sup.JobEnded(130)]


def test_all_hosts_know_of_replicas_that_died_before_they_joined():
  """Host 0 reads all notices, and the others its."""
  share = lambda host: Share(
    range(host, host + 1), range(1), range(host, host + 1)
  )
  hosts = [
    HostSupervisor(
      share(host),
      sup.Policy(whole=False),
      Peers(host, Notice(f"launcher {host}"), known, 0.0, _SILENCE),
      lambda: "",
    )
    for host, known in ((0, range(3)), (1, (0, 1)), (2, (0, 2)))
  ]
  beats = iter(range(1, 100))

  def exchange(reader, writer, now):
    for _ in range(2):  # A first one could be of an earlier launch.
      notice = codec.replace(hosts[writer].notice, beat=next(beats))
      hosts[reader].step(NoticeRead(writer, notice), now)

  for host in hosts:
    host.start(0.0)
  hosts[2].step(sup.ReplicaEnded(2, 1, "failed"), 1.0)
  exchange(0, 2, 1.0)
  exchange(1, 0, 1.0)
  assert [host.never_joined for host in hosts] == [{2}] * 3
  # It joins at its second start, and the news passes on in the same way.
  hosts[2].step(sup.Joined(2), 5.0)
  exchange(0, 1, 5.0)
  exchange(0, 2, 5.0)
  exchange(1, 0, 5.0)
  assert [host.never_joined for host in hosts] == [set()] * 3


def test_a_launcher_that_ends_says_so():
  two = _Hosts()
  two.start()
  two.tell(1, LauncherEnds("its launcher was stopped"), 5.0)
  assert two.read(0, 5.1) == [_KILL]
  assert "because its launcher was stopped" in two.said[0]


def test_a_second_launcher_of_a_host_ends_and_the_first_goes_on():
  own = Notice("b", "node2, process 7")
  second = Peers(0, own, [], 0.0)
  first = Notice("a", "node1, process 9", beat=5)
  assert second.update(0, first, 1.0) == ""
  refused = second.update(0, codec.replace(first, beat=6), 1.2)
  assert (
    "on host 0: this one (node2, process 7) and another (node1, process 9)"
    in refused
  )
  assert "--node-rank" in refused
  assert not second.may_write(1.2)


def test_two_launchers_of_one_host_that_begin_at_once_both_end():
  one = Peers(0, Notice("a"), [], 0.0)
  assert one.update(0, None, 1.0) == ""
  assert one.may_write(1.0)
  assert one.update(0, Notice("a", beat=1), 1.2) == ""
  refused = one.update(0, Notice("b", beat=1), 1.4)
  assert "Two launchers say that they are on host 0" in refused


def test_hosts_that_were_started_differently_name_both_settings():
  settings = lambda replicas: (("--nodes", "2"), ("--replicas", replicas))
  one = Peers(1, Notice("a", settings=settings("4")), [0], 0.0)
  # Of an earlier run.
  assert one.update(0, Notice("old", settings=settings("9"), beat=3), 0.5) == ""
  other = Notice("new", "node1, process 9", settings("2"), beat=1)
  refused = one.update(0, other, 0.7)
  assert "--replicas 4 here" in refused
  assert "--replicas 2 there (node1, process 9)" in refused
  assert "--nodes" not in refused


class _Launcher:
  """A host of the world below: its supervisor, and its processes."""

  def __init__(self, world, host, now):
    self.world, self.host = world, host
    self.name = f"{host}-{world.random.random()}"
    self.beat, self.alive, self.ended = 0, True, False
    self.running = None  # Which start.
    share = Share(range(1), range(host, host + 1), range(world.hosts))
    policy = sup.Policy(restarts=50, whole=False, pauses=(0.1, 0.5))
    peers = Peers(host, Notice(self.name), range(world.hosts), now, _SILENCE)
    self.supervisor = HostSupervisor(share, policy, peers, lambda: f"h{host}:1")
    self.execute(self.supervisor.start(now))

  def step(self, given, now):
    self.execute(self.supervisor.step(given, now))

  def execute(self, effects):
    for effect in effects:
      match effect:
        case sup.StartReplica(_, restarts, address):
          assert self.running is None
          assert address == "h0:1"
          self.running = restarts
        case sup.KillReplica():
          assert self.running is not None
          self.running = None
        case sup.JobEnded() | sup.GiveUpRun():
          self.ended = True


class _World:
  """Hosts whose notices are late; processes and launchers that die."""

  def __init__(self, seed, hosts=3):
    self.random, self.hosts = random.Random(seed), hosts
    self.board, self.late = {}, []
    self.now = 0.0
    self.launchers = [_Launcher(self, h, 0.0) for h in range(hosts)]
    self.kills = 0

  def run(self, until, faults):
    while self.now < until:
      self.now += 0.1
      if faults and self.random.random() < 0.02:
        self.strike()
      self.late, due = (
        [x for x in self.late if x[0] > self.now],
        [x for x in self.late if x[0] <= self.now],
      )
      for _, reader, writer, notice in due:
        if reader.alive:
          reader.step(NoticeRead(writer, notice), self.now)
      for one in self.launchers:
        if one.alive and not one.ended:
          self.turn(one, faults)

  def turn(self, one, faults):
    one.step(sup.Tick(), self.now)
    one.beat += 1
    if one.supervisor.writes:
      notice = codec.replace(one.supervisor.notice, beat=one.beat)
      self.board[one.host] = notice
    for other in range(self.hosts):
      delay = self.random.uniform(0.0, 2.0 if faults else 0.3)
      if other == one.host:
        delay = 0.0  # It has one request for its own notice at a time.
      if self.random.random() < 0.5:
        found = self.board.get(other)
        self.late.append((self.now + delay, one, other, found))

  def strike(self):
    one = self.random.choice(self.launchers)
    if self.random.random() < 0.3:
      # Another launcher takes the host's place, a while later.
      one.alive = False
      pause = self.random.uniform(0.0, 1.5 * _SILENCE)
      self.run(self.now + pause, faults=False)
      made = _Launcher(self, one.host, self.now)
      self.launchers[one.host] = made
      self.kills += 1
    elif one.alive and one.running is not None:
      one.running = None
      one.step(sup.ReplicaEnded(0, -9, "killed"), self.now)
      self.kills += 1


def test_hosts_come_to_agree_whatever_has_happened():
  kills = 0
  for seed in range(40):
    world = _World(seed)
    world.run(60.0, faults=True)
    # Once nothing more happens, all run the same starts, or none is left.
    world.run(world.now + 2 * _MEET, faults=False)
    kills += world.kills
    starts = {one.running for one in world.launchers}
    ended = [one.ended for one in world.launchers]
    assert len(starts) == 1, (seed, starts, ended)
    assert None not in starts or all(ended), (seed, starts, ended)
  assert kills > 40
