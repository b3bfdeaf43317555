"""The pool of processes, with processes that a test plays."""

import types

import pytest

from optax_dist.cli.chaos import pool as pools


class Process:
  """Stands for a `child.Child`."""

  def __init__(self, name, command, log, env):
    self.name, self.env = name, env
    self.pid = int(name.split()[1])
    self.ended, self.killed = None, 0
    self.popen = types.SimpleNamespace(poll=lambda: self.ended)

  def kill(self):
    self.killed += 1


class Store:
  """Stands for a `store.process.StoreProcess`."""

  def __init__(self, number):
    self.address = f"127.0.0.1:{number},127.0.0.1:9"
    self.ended, self.stopped = None, 0
    self.process = types.SimpleNamespace(poll=lambda: self.ended)

  def stop(self):
    self.stopped += 1


@pytest.fixture
def world(monkeypatch):
  """All processes and stores that were started."""
  found = types.SimpleNamespace(processes=[], stores=[], alive=[])

  def start(*told):
    found.processes.append(Process(*told))
    return found.processes[-1]

  def start_store(secret, port):
    found.stores.append(Store(len(found.stores)))
    return found.stores[-1]

  monkeypatch.setattr(pools.child, "Child", start)
  monkeypatch.setattr(pools.store_process, "start", start_store)
  monkeypatch.setattr(pools, "living", lambda token: list(found.alive))
  return found


def test_a_process_that_died_idle_is_not_taken(world, tmp_path):
  with pools.Pool(tmp_path) as pool:
    first, second, *_ = world.processes
    first.ended = -9
    assert pool.take() is second
    # When all are dead a new one is started.
    for process in world.processes:
      process.ended = 1
    taken = pool.take()
    assert taken.ended is None
    assert taken is world.processes[-1]


def test_there_are_always_processes_for_the_next_run(world, tmp_path):
  with pools.Pool(tmp_path) as pool:
    taken = [pool.take() for _ in range(20)]
    assert len(set(taken)) == 20
    assert {process.env["OPTAX_DIST_CHAOS"] for process in taken} == {
      pool.token
    }
    pool.top_up()
    idle = set(world.processes) - set(taken)
    assert len(idle) == pools.REPLICAS


def test_a_process_is_used_again_a_number_of_times(world, tmp_path):
  with pools.Pool(tmp_path) as pool:
    one = pool.take()
    used = 1
    while not one.killed:
      pool.give_back(one)
      assert used <= 100
      # It is the last in the row.
      others = []
      while not one.killed and (other := pool.take()) is not one:
        others.append(other)
      for other in others:
        pool.discard(other)
      used += not one.killed
    assert used == 25
    assert one.killed == 1


def test_a_process_that_ended_is_not_kept(world, tmp_path):
  with pools.Pool(tmp_path) as pool:
    one = pool.take()
    one.ended = 0
    pool.give_back(one)
    assert one.killed == 1
    assert all(pool.take() is not one for _ in range(9))


def test_at_the_end_everything_is_ended(world, tmp_path):
  with pools.Pool(tmp_path) as pool:
    pool.take()
    pool.discard(pool.take())
  assert [process.killed for process in world.processes] == [1] * len(
    world.processes
  )
  assert [store.stopped for store in world.stores] == [1]


def test_only_who_was_discarded_and_still_runs_is_left_over(world, tmp_path):
  with pools.Pool(tmp_path) as pool:
    one, other = pool.take(), pool.take()
    world.alive = [one.pid, other.pid]
    assert pool.orphans() == []
    pool.discard(one)
    assert pool.orphans() == [one.pid]


def test_a_store_that_died_is_replaced(world, tmp_path):
  with pools.Pool(tmp_path) as pool:
    assert pool.address == "127.0.0.1:0"
    assert not pool.store_died()
    world.stores[0].ended = -9
    assert pool.store_died()
    assert pool.address == "127.0.0.1:1"
    assert not pool.store_died()
  assert [store.stopped for store in world.stores] == [1, 1]
