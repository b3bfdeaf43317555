"""The exchange that needs no attempt: the same numbers, and never a wrong one."""

import time

import embedded_runs as runs
import jax.numpy as jnp
import pytest

from optax_dist.coordinator import ahead, embedded, messages, view

MOVED = {"inline_bytes": 0, "fingerprint_every": 1}


def told(world):
  """The attempts that a chief had to tell, as (step, members)."""
  found = []
  for key, blob in world.values.items():
    if key.startswith("log/"):
      entry, _ = messages.unpack(b"", key, blob)
      if entry["kind"] == "attempt":
        found.append((entry["step"], tuple(m[1] for m in entry["members"])))
  return sorted(found)


def check(results, path):
  """Survivors hold what the journal says, and it says every step once."""
  found = runs.records(path)
  runs.check_journal(found, 1)
  prints = runs.replay(found)
  for index, result in enumerate(results):
    if isinstance(result.error, runs.Killed):
      continue
    assert result.error is None
    for step, digest in result.prints.items():
      assert digest == prints[step], step
    runs.check_ledger({index: result}, found)


def test_a_number_is_of_one_step_one_term_and_these_members():
  numbers = {
    ahead.number(b"s", term, step, who)
    for term in (0, 1)
    for step in (3, 4)
    for who in ([0, 1], [1, 0], [0, 1, 2])
  }
  assert len(numbers) == 12
  assert ahead.number(b"t", 0, 3, [0, 1]) not in numbers


def test_an_attempt_has_all_peers_in_replica_order():
  peers = {
    7: view.Peer(7, "b", "x"),
    2: view.Peer(2, 1, "y"),
    5: view.Peer(5, 0, "z"),
  }
  entry = ahead.attempt(b"s", 3, 9, peers)
  assert [m[:3] for m in entry["members"]] == [
    [5, 0, 9],
    [2, 1, 9],
    [7, "b", 9],
  ]
  assert entry["attempt"] == ahead.number(b"s", 3, 9, [5, 2, 7])


@pytest.mark.parametrize("n", [2, 3])
def test_where_all_are_needed_no_attempt_is_told(n, tmp_path, monkeypatch):
  monkeypatch.setattr(ahead, "patience", lambda nbytes: 5.0)
  world = embedded.World()
  path = tmp_path / "run.jsonl"
  # An attempt is also told after a quarter of its time.
  patient = MOVED | {"timeout": 60.0, "attempt_timeout": 20.0}

  def train(replica, result):
    # Before all have joined it is not known who will take part.
    end = time.monotonic() + 20.0
    while len(replica._follower.view.peers) < n and time.monotonic() < end:
      time.sleep(0.001)
    runs.to_step(8)(replica, result)

  results = runs.run(train, n, world=world, journal=path, **patient)
  check(results, path)
  assert told(world) == []


def test_it_is_bit_for_bit_what_an_attempt_gives(monkeypatch):
  results = runs.run(runs.to_step(6), 3, **MOVED)
  monkeypatch.setattr(embedded.EmbeddedExchange, "is_near", lambda *_: False)
  world = embedded.World()
  others = runs.run(runs.to_step(6), 3, world=world, **MOVED)
  assert [step for step, _ in told(world)] == list(range(6))
  assert [r.prints for r in results] == [r.prints for r in others]
  assert len(results[0].prints) == 6


def test_backup_replicas_are_told():
  # Who will be first can't be known.
  world = embedded.World()
  results = runs.run(runs.to_step(4), 3, k=2, world=world, **MOVED)
  assert [r.error for r in results] == [None] * 3
  assert len(told(world)) >= 4


def test_one_that_computes_for_long_is_waited_for_without_polling(tmp_path):
  def train(replica, result):
    if replica.replica == 1:
      time.sleep(0.3)
    runs.to_step(3)(replica, result)

  world = embedded.World()
  path = tmp_path / "run.jsonl"
  results = runs.run(train, 2, world=world, journal=path, **MOVED)
  check(results, path)
  # The early one has given it up, so that the chief has to tell the attempt.
  assert told(world)[0] == (0, (0, 1))


def test_a_second_gradient_of_a_step_is_never_offered_as_the_first(tmp_path):
  # Replica 0 has nothing to give at first; with the second one all goes on.
  def train(replica, result):
    if replica.replica == 0:
      bad = {"b": jnp.full(70, jnp.inf), "w": jnp.ones((5, 30))}
      result.computed += 1
      assert replica.step(bad).reason == "non_finite"
    runs.to_step(3)(replica, result)

  path = tmp_path / "run.jsonl"
  results = runs.run(train, 2, journal=path, **MOVED)
  check(results, path)


@pytest.mark.parametrize("phase", ["reduce_scatter", "gather", "done"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_replica_that_dies_in_it_leaves_no_trace(phase, victim, tmp_path):
  path = tmp_path / "run.jsonl"
  with runs.Faults({(phase, victim, 3): runs.kill}) as faults:
    results = runs.run(
      runs.to_step(8),
      3,
      journal=path,
      quorum={"lower_on_loss": True},
      **MOVED,
    )
  assert faults.done == [(phase, victim, 3)]
  assert isinstance(results[victim].error, runs.Killed)
  check(results, path)
  survivors = [r for i, r in enumerate(results) if i != victim]
  assert [r.prints[8] for r in survivors] == [survivors[0].prints[8]] * 2


@pytest.mark.parametrize("kind", ["done", "pass"])
def test_a_report_that_is_lost_is_asked_for(kind, monkeypatch, tmp_path):
  from optax_dist.coordinator import follower

  lost = []
  tell = follower.Follower.tell

  def forgetful(self, header, payload=b""):
    if header["kind"] == kind and self.replica == 1 and not lost:
      lost.append(header)
      return
    tell(self, header, payload)

  def train(replica, result):
    if kind == "pass" and replica.replica == 0:
      time.sleep(0.2)
    runs.to_step(3)(replica, result)

  monkeypatch.setattr(follower.Follower, "tell", forgetful)
  world = embedded.World()
  path = tmp_path / "run.jsonl"
  start = time.monotonic()
  results = runs.run(train, 2, world=world, journal=path, **MOVED)
  # After a quarter of attempt_timeout (2 s), or when the other one gives up.
  assert time.monotonic() - start < 2.0
  check(results, path)
  assert lost
  assert told(world)[0] == (0, (0, 1))


def test_a_new_chief_is_not_told_old_numbers(tmp_path):
  path = tmp_path / "run.jsonl"
  with runs.Faults({("committing", 0, 3): runs.kill}) as faults:
    results = runs.run(
      runs.to_step(8),
      3,
      journal=path,
      quorum={"lower_on_loss": True},
      **MOVED,
    )
  assert faults.done
  alive = [r for r in results if r.error is None]
  assert len(alive) >= 2
  assert len({r.prints[8] for r in alive}) == 1


def test_patience_grows_with_the_gradient():
  assert ahead.patience(0) == pytest.approx(0.05)
  assert ahead.patience(10**8) == pytest.approx(0.15)
