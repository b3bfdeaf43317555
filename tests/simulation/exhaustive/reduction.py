"""Orders of events that make no difference: one of them is enough.

What may happen next in a state are, mostly, events of one process each: it takes
a message, an answer or a deadline, or it is killed or stopped. Events of two
processes commute: each changes its own process, takes from the front of what
comes to it, and adds to the end of what goes to others. So the events of one
process may stand for all that may happen (a persistent set) wherever nothing that
others do meanwhile, were it to wait, could add to these events or change them:

- no message, and no answer of the store, can come from where none is waiting yet.
  That is found by letting the others go on without it, for some states; whoever
  may still be killed or stopped can be heard by all it is connected to at once.
- It looks at nothing that others may change: the leader's sign of life, or whether
  a peer is just connecting to it; and has begun no connection that others may look
  for. What it puts in the store waits for its turn among all others' events.
- Its end is seen by invariants about others: such an event does not stand for all;
  nor one that brings it a mean, where a commit may be put meanwhile. What else the
  checker is told may be told sooner: that a state is published, a gradient submitted
  or an outcome told. Each is checked against the log, which only grows, so that what
  is wrong later is wrong at once, and what is wrong once the log has more is found
  when it has.

A request whose key is there already has the same answer whenever it is given, for
nothing is overwritten, nor is the log trimmed in so short a run: it stands for all
as well. A fault is one process's own event because each exploration says first whom
it may strike. Time passes only in states where nothing else can happen, and all that
can happen there is followed; no run returns to a state without time passing, and
where one did, all of that state's events would be followed.
"""

from __future__ import annotations

from typing import Any

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol.entries import (
  Committed,
  Record,
  StoreValue,
)
from tests.simulation.exhaustive import parts, states
from tests.simulation.invariants import Violation

# Choices that are no process's own.
_OF_NOBODY = ("store", "time")
# As long as one of these may happen, no time passes.
_URGENT = ("net", "answer", "compute", "due", "slow", "store")
# What the checker may be told sooner or later.
_COMMUTE = (
  "published",
  "admitted",
  "submitted",
  "resolved",
  "has_all",
  "died",
)
# So many states are looked at to see whether one process may send another one
# anything; if that is not known by then, it may.
_LOOK_AHEAD = 60


class Reduction:
  """Which choices of a state are enough."""

  def __init__(self, all_: states.States):
    self._all = all_
    self._keys_of: dict[int, frozenset[str]] = {}
    self._moved: dict[Any, bool] = {}

  def enough(
    self, state: states.State, choices: list[states.Choice]
  ) -> list[states.Choice]:
    """Some choices that stand for all: the others can wait (see the module)."""
    for choice in choices:
      if choice[0] == "store" and self._is_settled(state, choice[1]):
        return [choice]
    for p in range(self._all.n):
      mine = [c for c in choices if c[1] == p and c[0] not in _OF_NOBODY]
      asks = state[self._all.answers + p] == states.EMPTY and self._asks(
        state, p
      )
      if asks:
        mine.append(("store", p))
      if len(mine) == len(choices):
        continue
      sees = self._sees(state, p, mine)
      if sees is not None and self._hears_no_more(state, p, asks, sees):
        return mine
    return choices

  def _asks(self, state: states.State, p: int) -> bool:
    """Whether the next request is one of those that change nothing."""
    requests = self._all.queues.values[state[self._all.requests + p]]
    return bool(requests) and isinstance(
      self._all.items.values[requests[0]], fx.Get
    )

  def _is_settled(self, state: states.State, p: int) -> bool:
    """Whether the next request's answer is the same, whenever it is given."""
    request = self._all.items.values[
      self._all.queues.values[state[self._all.requests + p]][0]
    ]
    return request.key in self._keys(state[self._all.store])

  def _keys(self, store: int) -> frozenset[str]:
    found = self._keys_of.get(store)
    if found is None:
      keys = frozenset(key for key, _ in self._all.stores.values[store])
      found = self._keys_of[store] = keys
    return found

  def _sees(
    self, state: states.State, p: int, mine: list[states.Choice]
  ) -> frozenset[str] | None:
    """What must not change, for what a process may do next to commute with all.

    That is "beat", the leader's sign of life, if it looks at that; and "commits", if
    it gets a mean, for a commit that needs it is checked when it is put. None where
    it doesn't commute with what others do, whatever that is.
    """
    urgent = False
    sees: set[str] = set()
    facts = self._all.facts[state[p]]
    for q in range(self._all.n):
      # Whether it may be found while it connects, depends on others.
      theirs = self._all.facts[state[q]]
      if q != p and theirs.alive:
        ours = dict(facts.peers).get(self._all.names[q])
        known = dict(theirs.peers).get(self._all.names[p])
        if ours != known and ours is not None and ours not in theirs.closed:
          return None
    for choice in mine:
      kind = choice[0]
      urgent = urgent or kind in _URGENT
      if kind in ("kill", "kill amid", "stop", "store"):
        continue
      if kind == "go on":
        return None
      event, _ = self._all.event(state, choice)
      result = self._all.result(state, p, event)
      if result.error or not self._is_quiet(facts, result):
        return None
      if "peers" in result.looked:
        return None
      sees |= result.looked
      if facts.means != self._all.facts[result.process].means:
        sees.add("commits")
    return frozenset(sees) if urgent else None

  def _is_quiet(self, before: parts.Facts, result: states.Result) -> bool:
    """Whether nobody else, nor an invariant, sees an event but by messages."""
    after = self._all.facts[result.process]
    if (before.alive, before.over) != (after.alive, after.over):
      return False
    if (before.needs_since, before.fetching) != (
      after.needs_since,
      after.fetching,
    ):
      return False
    return all(
      out[0] in (states.NET, states.STORE)
      or (
        out[0] == states.CHECK and self._all.calls.values[out[1]][0] in _COMMUTE
      )
      for out in result.outputs
    )

  def _hears_no_more(
    self, state: states.State, p: int, asks: bool, sees: frozenset[str]
  ) -> bool:
    """Whether others can do nothing to a process, until it moves.

    Nothing comes to it from where nothing has come yet; where it asks the store,
    nobody puts that; where it looks at the leader's sign of life, that stays; where
    it gets a mean, nobody puts a commit.
    """
    row, empty, key = list(state), [], ""
    requests = self._all.queues.values[state[self._all.requests + p]]
    if requests and state[self._all.answers + p] == states.EMPTY:
      if not asks:
        return False
      key = self._all.items.values[requests[0]].key
    for q in range(self._all.n):
      at = self._all.net + q * self._all.n + p
      if q == p or not self._all.facts[state[q]].alive:
        continue
      if row[at] == states.EMPTY:
        if (state[self._all.kills] | state[self._all.stops]) & (1 << q):
          return False
        empty.append(at)
      row[at] = states.EMPTY
    beat = state[self._all.beat] if "beat" in sees else -1
    commits = "commits" in sees
    if not empty and not key and not sees:
      return True
    return not self._may_be_moved(
      tuple(row), p, (tuple(empty), key, beat, commits)
    )

  def _may_be_moved(self, state: states.State, p: int, by: Any) -> bool:
    """Whether any of that can happen while this process does nothing."""
    empty, key, beat, commits = by
    known = self._moved
    if (state, p, by) in known:
      return known[state, p, by]
    into = [self._all.net + q * self._all.n + p for q in range(self._all.n)]
    visited = {state}
    todo = [state]
    result = False
    while todo and not result:
      at = todo.pop()
      for choice in self._all.choices(at):
        kind = choice[0]
        mine = choice[1] == p and (kind != "store" or key)
        if kind == "time" or mine:
          continue
        if kind == "store" and (key or commits):
          asked = self._all.queues.values[at[self._all.requests + choice[1]]][0]
          request = self._all.items.values[asked]
          if isinstance(request, fx.Put) and (
            request.key == key or (commits and _commits(request.value))
          ):
            result = True
            break
        try:
          row = list(self._all.take(at, choice))
        except Violation:
          result = True
          break
        if any(row[i] != states.EMPTY for i in empty):
          result = True
          break
        if beat >= 0 and row[self._all.beat] != beat:
          result = True
          break
        for i in into:
          row[i] = states.EMPTY
        after = tuple(row)
        found = known.get((after, p, by))
        if found or len(visited) > _LOOK_AHEAD:
          result = True
          break
        if found is None and after not in visited:
          visited.add(after)
          todo.append(after)
    if result:
      known[state, p, by] = known[at, p, by] = True
    else:
      for one in visited:
        known[one, p, by] = False
    return result


def _commits(value: StoreValue) -> bool:
  """Whether it is a record with a commit whose mean its members have."""
  return isinstance(value, Record) and any(
    isinstance(entry, Committed) and entry.mean is None
    for entry in value.entries
  )
