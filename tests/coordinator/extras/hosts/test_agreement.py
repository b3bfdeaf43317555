"""Tests of the launchers' decisions about replicas on several hosts."""

import random

import pytest

from optax_dist.coordinator.extras.hosts import agreement, notices
from optax_dist.coordinator.extras.hosts.nodes import Place
from optax_dist.coordinator.extras.hosts.supervisor import HostSupervisor
from optax_dist.coordinator.launch import supervisor as sup
from optax_dist.coordinator.protocol import codec

_MEET, _SILENCE = 30.0, 6.0


def _agreement(host, name="", hosts=2, now=0.0, replicas=1, **told):
  places = [
    Place(r, range(host, host + 1), range(hosts)) for r in range(replicas)
  ]
  patience = agreement.Patience(_MEET, _SILENCE)
  name = name or f"launcher {host}"
  return agreement.Agreement(host, name, places, patience, now, **told)


class _Two:
  """Two hosts that read each other's notices when told to."""

  def __init__(self):
    self.machines = [_agreement(0), _agreement(1)]
    self.beats = [0, 0]

  def tell(self, host, given, now):
    return self.machines[host].step(given, now)

  def read(self, reader, now):
    """One host writes its notice, and the other one reads it."""
    writer = 1 - reader
    self.beats[writer] += 1
    notice = codec.replace(
      self.machines[writer].notice, beat=self.beats[writer]
    )
    again = notices.CODEC.decode(notices.CODEC.encode(notice))
    assert again == notice
    return self.machines[reader].step(agreement.Heard(writer, again), now)

  def ask(self, number, now, hosts=(0, 1)):
    """Hosts want to start the replica; returns what follows at once."""
    return [
      self.tell(host, sup.StartReplica(0, number, f"h{host}:{number}"), now)
      for host in hosts
    ]

  def start(self, now=1.0):
    """Both run the replica."""
    for host in (0, 1):
      self.tell(host, agreement.Heard(1 - host, None), now)
    assert self.ask(0, now) == [[], []]
    assert self.read(0, now) == [BEGIN]
    assert self.read(1, now) == [BEGIN]


# All meet at the address of the first host.
BEGIN = sup.StartReplica(0, 0, "h0:0")


def _stages(machine):
  return [part.stage for part in machine.notice.parts]


def test_a_replica_starts_once_all_hosts_are_ready_and_ends_well():
  two = _Two()
  two.start()
  assert two.tell(0, sup.ReplicaEnded(0, 0), 5.0) == []
  assert two.read(1, 5.1) == []  # It waits for its own.
  assert two.tell(1, sup.ReplicaEnded(0, 0), 6.0) == [sup.ReplicaEnded(0, 0)]
  assert two.read(0, 6.1) == [sup.ReplicaEnded(0, 0)]
  # Nothing follows from the end of the other launcher.
  assert two.tell(0, sup.Tick(), 6.2 + _SILENCE) == []


def test_a_process_that_dies_on_any_host_ends_the_replica_on_all():
  two = _Two()
  two.start()
  killed = sup.ReplicaEnded(0, -9, "was killed", "a tail", "process 1")
  gone = sup.ReplicaEnded(
    0, -9, "ended, because process 1 on host 1 was killed", "a tail"
  )
  # On the other host ...
  assert two.tell(1, killed, 5.0) == [gone]
  assert two.read(0, 5.1) == [sup.KillReplica(0), gone]
  assert two.ask(1, 5.1) == [[], []]
  again = sup.StartReplica(0, 1, "h0:1")
  assert two.read(1, 5.2) == [again]
  assert two.read(0, 5.2) == [again]
  # ... and on the first one.
  failed = sup.ReplicaEnded(0, 3, "failed", process="process 0")
  gone = sup.ReplicaEnded(0, 3, "ended, because process 0 on host 0 failed")
  assert two.tell(0, failed, 9.0) == [gone]
  # It is ready again before the other one has read that it had failed.
  two.ask(2, 9.1, hosts=[0])
  assert two.read(1, 9.2) == [sup.KillReplica(0), gone]
  again = sup.StartReplica(0, 2, "h0:2")
  assert two.ask(2, 9.3, hosts=[1]) == [[again]]
  assert two.read(0, 9.4) == [again]


def test_a_failure_on_one_host_undoes_the_good_end_on_another():
  two = _Two()
  two.start()
  assert two.tell(0, sup.ReplicaEnded(0, 0), 5.0) == []
  two.tell(1, sup.ReplicaEnded(0, -9, "was killed", "", "process 1"), 5.1)
  [gone] = two.read(0, 5.2)
  assert (gone.code, gone.words) == (
    -9,
    "ended, because process 1 on host 1 was killed",
  )


def test_a_host_that_does_not_come_is_named():
  one = _agreement(0, hosts=3)
  one.step(sup.StartReplica(0, 0, "h:1"), 0.0)
  one.step(agreement.Heard(1, None), 0.0)
  one.step(agreement.Heard(1, notices.Notice("b", 1)), _MEET - 1.0)
  assert one.step(sup.Tick(), _MEET - 0.1) == []
  [given_up] = one.step(sup.Tick(), _MEET)
  assert given_up == sup.CannotStart(0, "the launcher of host 2 has not come")
  assert _stages(one) == [notices.Stage.ABSENT]


def test_a_replica_that_one_host_abandons_starts_on_none():
  two = _Two()
  two.start()
  two.tell(1, sup.ReplicaEnded(0, 3, "failed", process="process 1"), 2.0)
  two.tell(1, sup.CannotStart(0, "no restart is left"), 2.0)
  _, gone = two.read(0, 2.1)
  assert gone.code == 3
  assert two.ask(1, 2.2, hosts=[0]) == [
    [sup.CannotStart(0, "no restart is left")]
  ]


def test_a_host_that_is_silent_ends_the_replica_and_may_come_back():
  two = _Two()
  two.start()
  assert two.read(0, 5.0) == []
  assert two.tell(0, sup.Tick(), 5.0 + _SILENCE) == []
  kill, gone = two.tell(0, sup.Tick(), 5.1 + _SILENCE)
  assert kill == sup.KillReplica(0)
  assert "host 1 was silent for 6 s" in gone.words
  assert gone.code != 0
  # It is wanted again, and waits; the host comes back in time.
  now = 12.0
  assert two.ask(1, now, hosts=[0]) == [[]]
  assert two.tell(0, sup.Tick(), now + _SILENCE - 1.0) == []
  kill, gone = two.read(1, now + _SILENCE - 0.7)
  assert "host 1 was silent" in gone.words
  two.ask(1, now + _SILENCE - 0.6, hosts=[1])
  again = sup.StartReplica(0, 1, "h0:1")
  assert two.read(0, now + _SILENCE - 0.5) == [again]
  # And one that does not come back is given up.
  two.tell(0, sup.ReplicaEnded(0, -9), 20.0)
  now = 30.0
  assert two.ask(2, now, hosts=[0]) == [[]]
  [given_up] = two.tell(0, sup.Tick(), now + _SILENCE)
  assert "host 1 was silent" in given_up.words


def test_what_an_earlier_launcher_has_left_is_not_taken_for_life():
  ready = (notices.Part(0, 0, notices.Stage.READY),)
  old = notices.Notice("old", 70, parts=ready)
  one = _agreement(0)
  assert one.step(BEGIN, 0.0) == []
  assert one.step(agreement.Heard(1, old), 1.0) == []
  assert one.step(agreement.Heard(1, old), 1.2) == []
  new = notices.Notice("new", 1, parts=ready)
  assert one.step(agreement.Heard(1, new), 2.0) == [BEGIN]
  # An old one that comes late is of no effect.
  again = codec.replace(new, beat=9)
  assert one.step(agreement.Heard(1, again), 3.0) == []
  assert one.step(agreement.Heard(1, new), 4.0) == []
  assert one.step(sup.Tick(), 3.1 + _SILENCE)[0] == sup.KillReplica(0)


@pytest.mark.parametrize("host", [0, 1])
def test_a_launcher_that_was_started_anew_has_none_of_the_processes(host):
  two = _Two()
  two.start()
  two.machines[host] = _agreement(host, "another", now=4.0)
  two.ask(0, 4.0, hosts=[host])
  assert two.read(host, 4.1) == []
  assert two.read(host, 4.3) == []  # What runs is with the one before.
  kill, gone = two.read(1 - host, 4.4)
  assert kill == sup.KillReplica(0)
  assert f"host {host} was started anew" in gone.words
  two.ask(1, 4.5, hosts=[1 - host])
  # It counts its starts on from there.
  [begins] = two.read(host, 4.6)
  assert begins.restarts == 1
  assert two.read(1 - host, 4.7) == [begins]


def test_when_one_host_knows_that_the_run_is_over_all_do():
  two = _Two()
  two.start()
  # The second host has lost its processes; they will not be missed.
  two.tell(1, sup.ReplicaEnded(0, -9, "was killed"), 5.0)
  two.ask(1, 5.0, hosts=[1])
  assert two.tell(0, sup.RunOver(), 5.0) == []
  assert two.read(1, 5.1) == [
    sup.RunOver(),
    sup.ReplicaEnded(0, 0),
  ]
  # A late one is ended, and is missed by none.
  two = _Two()
  two.start()
  two.tell(0, sup.RunOver(), 5.0)
  two.tell(0, sup.KillReplica(0), 6.0)
  assert two.read(1, 6.1) == [sup.RunOver()]
  assert two.tell(1, sup.Tick(), 7.0) == []


def test_what_is_left_on_other_hosts_ends_by_itself():
  two = _Two()
  two.start()
  two.tell(0, sup.RunOver(), 5.0)
  assert two.tell(0, sup.ReplicaEnded(0, 0), 5.1) == [sup.ReplicaEnded(0, 0)]
  assert two.read(1, 5.2) == [sup.RunOver()]
  assert two.tell(1, sup.ReplicaEnded(0, 0), 5.3) == [sup.ReplicaEnded(0, 0)]


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_host_that_is_to_end_has_the_replica_leave(stopped):
  two = _Two()
  two.start()
  assert two.tell(stopped, sup.LauncherStops(15), 5.0) == []
  assert two.read(1 - stopped, 5.1) == [sup.SignalReplica(0, 15)]
  assert two.read(1 - stopped, 5.2) == []  # Once.
  # Its own processes have been told already.
  assert two.read(stopped, 5.3) == []
  # It does not wait for the others.
  assert two.tell(stopped, sup.ReplicaEnded(0, 0), 6.0) == [
    sup.ReplicaEnded(0, 0)
  ]
  two.read(1 - stopped, 6.1)
  assert two.tell(1 - stopped, sup.ReplicaEnded(0, 0), 6.2) == [
    sup.ReplicaEnded(0, 0)
  ]


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_host_that_waits_for_others_can_be_stopped(stopped):
  one = _agreement(stopped)
  assert one.step(sup.StartReplica(0, 0, "h:1"), 0.0) == []
  assert one.step(sup.LauncherStops(2), 1.0) == [sup.ReplicaEnded(0, 0)]
  assert one.step(sup.Tick(), 100.0) == []


def test_a_launcher_waits_until_an_earlier_one_of_its_host_is_silent():
  one = _agreement(0, "a")
  left = notices.Notice("of an earlier run", 5)
  for now in (1.0, 1.2, 2.4):
    assert one.step(agreement.Heard(0, left), now) == []
    assert not one.writes
  assert one.step(agreement.Heard(0, left), 2.6) == []
  assert one.writes
  other = _agreement(0, "b")
  assert other.step(agreement.Heard(0, None), 0.1) == []
  assert other.writes


def test_a_second_launcher_of_a_host_ends_and_the_first_goes_on():
  second = _agreement(0, "b", process="node2, process 7")
  first = notices.Notice("a", 5, process="node1, process 9")
  assert second.step(agreement.Heard(0, first), 1.0) == []
  beats = codec.replace(first, beat=6)
  [refused] = second.step(agreement.Heard(0, beats), 1.2)
  assert (
    "on host 0: this one (node2, process 7) and another (node1, process 9)"
    in (refused.reason)
  )
  assert "--node-rank" in refused.reason
  assert not second.writes


def test_two_launchers_of_one_host_that_begin_at_once_both_end():
  one = _agreement(0, "a")
  one.step(agreement.Heard(0, None), 1.0)
  assert one.step(agreement.Heard(0, notices.Notice("a", 1)), 1.2) == []
  [refused] = one.step(agreement.Heard(0, notices.Notice("b", 1)), 1.4)
  assert "Two launchers say that they are on host 0" in refused.reason


def test_hosts_that_were_started_differently_name_both_settings():
  two = _agreement(1, settings=[("--nodes", "2"), ("--replicas", "4")])
  left = notices.Notice(
    "old", 3, settings=(("--nodes", "2"), ("--replicas", "9"))
  )
  assert two.step(agreement.Heard(0, left), 0.5) == []  # Of an earlier run.
  settings = (("--nodes", "2"), ("--replicas", "2"))
  other = notices.Notice(
    "new", 1, settings=settings, process="node1, process 9"
  )
  [refused] = two.step(agreement.Heard(0, other), 0.7)
  assert "--replicas 4 here" in refused.reason
  assert "--replicas 2 there (node1, process 9)" in refused.reason
  assert "--nodes" not in refused.reason


class _Launcher:
  """A host of the world below: its supervisor, and its processes."""

  def __init__(self, world, host, now):
    self.world, self.host = world, host
    self.name = f"{host}-{world.random.random()}"
    self.beat, self.alive, self.ended = 0, True, False
    self.running = {}  # By replica: which start.
    places = [
      Place(r, range(host, host + 1), range(world.hosts)) for r in range(2)
    ]
    self.agreement = agreement.Agreement(
      host, self.name, places, agreement.Patience(_MEET, _SILENCE), now
    )
    policy = sup.Policy(restarts=50, whole=False, pauses=(0.1, 0.5))
    self.supervisor = HostSupervisor(
      places, policy, self.agreement, lambda: f"h{host}:1"
    )
    self.execute(self.supervisor.start(now))

  def step(self, given, now):
    self.execute(self.supervisor.step(given, now))

  def execute(self, effects):
    for effect in effects:
      match effect:
        case sup.StartReplica(replica, restarts, address):
          assert replica not in self.running
          assert address == "h0:1"
          self.running[replica] = restarts
        case sup.KillReplica(replica):
          del self.running[replica]
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
          reader.step(agreement.Heard(writer, notice), self.now)
      for one in self.launchers:
        if one.alive and not one.ended:
          self.turn(one, faults)

  def turn(self, one, faults):
    one.step(sup.Tick(), self.now)
    one.beat += 1
    if one.agreement.writes:
      notice = codec.replace(one.agreement.notice, beat=one.beat)
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
    elif one.alive and one.running:
      replica = self.random.choice(sorted(one.running))
      del one.running[replica]
      one.step(sup.ReplicaEnded(replica, -9, "killed"), self.now)
      self.kills += 1


def test_hosts_come_to_agree_whatever_has_happened():
  kills = 0
  for seed in range(40):
    world = _World(seed)
    world.run(60.0, faults=True)
    # Once nothing more happens, all run the same starts, or none is left.
    world.run(world.now + 2 * _MEET, faults=False)
    kills += world.kills
    for replica in (0, 1):
      starts = {one.running.get(replica) for one in world.launchers}
      ended = [one.ended for one in world.launchers]
      assert len(starts) == 1, (seed, starts, ended)
      assert None not in starts or all(ended), (seed, starts, ended)
  assert kills > 40
