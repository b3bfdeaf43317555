"""Runs on the embedded engine in which replicas fail, and what must hold then."""

import collections
import copy
import dataclasses
import json
import pathlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_dist.coordinator import fingerprint, journal, strategies
from optax_dist.coordinator._internal import phases
from optax_dist.coordinator.options import Options
from optax_dist.coordinator.replica import Replica
from optax_dist.coordinator.runtime import endpoint
from optax_dist.coordinator.training import participant

# Without faults no replica waits this long, however busy the machine is.
PATIENT = {"timeout": 60.0, "transfer_timeout": 10.0, "silence_timeout": 10.0}
PARAMS = {"b": jnp.linspace(0.5, 1.0, 70), "w": jnp.ones((5, 30))}


OPT = optax.sgd(0.1, momentum=0.9)
_compiled: dict[int, Any] = {}


def _sync(opt: Any, quorum: strategies.Quorum) -> strategies.SyncReplicas:
  """Compiled once for each optimizer, for there are many runs."""
  if id(opt) not in _compiled:
    _compiled[id(opt)] = opt, strategies.SyncReplicas(opt, quorum)
  made = copy.copy(_compiled[id(opt)][1])
  made.quorum = quorum
  return made


class Killed(Exception):
  """Raised by a fault: the thread's replica ends."""


@jax.jit
def gradient(params, batch):
  """A gradient that depends on both, so that no mix-up goes unseen."""
  return jax.tree.map(
    lambda x: 0.1 * x + jnp.sin(batch.astype(x.dtype)), params
  )


def batch_of(replica: int, number: int) -> int:
  return 1000 * replica + number


def compute(replica: Replica, number: int) -> tuple[Any, int]:
  batch = batch_of(replica.replica, number)
  return gradient(replica.params, jnp.asarray(batch)), batch


@dataclasses.dataclass
class Result:
  """The observations of a replica."""

  computed: int = 0
  counts: dict[str, int] = dataclasses.field(default_factory=dict)
  prints: dict[int, str] = dataclasses.field(default_factory=dict)
  outcomes: list[Any] = dataclasses.field(default_factory=list, repr=False)
  params: Any = dataclasses.field(default=None, repr=False)
  opt_state: Any = dataclasses.field(default=None, repr=False)
  error: BaseException | None = None
  stats: dict[str, Any] = dataclasses.field(default_factory=dict)
  value: Any = None


def make(
  world: endpoint.World,
  index: Any,
  *,
  k: int,
  n: int,
  params: Any = None,
  opt: Any = None,
  strategy: Any = None,
  quorum: dict[str, Any] | None = None,
  opt_state: Any = None,
  inner_state: Any = None,
  global_step: int = 0,
  name: str | None = None,
  data: Any = None,
  progress: Any = None,
  lineage: Any = None,
  **settings: Any,
) -> Replica:
  """A replica that has yet to start."""
  numbers = strategies.Quorum(k, n, **(quorum or {}))
  chosen = (strategy or _sync)(opt or OPT, numbers)
  place = world.connect(name or str(index))
  with place.closed_on_error():
    part = participant.Participant(
      place,
      chosen,
      PARAMS if params is None else params,
      replica=index,
      settings=Options(**(PATIENT | settings)),
      opt_state=opt_state,
      inner_state=inner_state,
      global_step=global_step,
      data=data,
      progress=progress,
      lineage=lineage,
    )
    return Replica(part)


def to_step(target: int) -> Callable[[Replica, Result], None]:
  """Returns a training loop that ends at this global step."""

  def train(replica: Replica, result: Result) -> None:
    while replica.global_step < target:
      grads, batch = compute(replica, result.computed)
      result.computed += 1
      outcome = replica.step(grads, batch=batch)
      result.outcomes.append(outcome)
      result.prints[replica.global_step] = replica.fingerprint()
      if outcome.finished:
        return

  return train


def start(
  one: Replica, train: Callable[[Replica, Result], Any], result: Result
) -> threading.Thread:
  """Runs a replica in a separate thread."""

  def run() -> None:
    try:
      with one.start():
        result.value = train(one, result)
        result.params, result.opt_state = one.center, one.opt_state
    except BaseException as error:
      result.error = error
      one.close()
    finally:
      result.counts = one.stats()["gradients"]

  thread = threading.Thread(target=run, name=f"replica-{one.replica}")
  thread.start()
  return thread


def run(
  train: Callable[[Replica, Result], Any],
  n: int,
  *,
  world: endpoint.World | None = None,
  limit: float = 120.0,
  **options: Any,
) -> list[Result]:
  """Runs n replicas to their ends, which must come within the limit.

  None begins to train before all are there.
  """
  together = threading.Barrier(n)

  def wait_and_train(replica: Replica, result: Result) -> Any:
    together.wait(60.0)
    return train(replica, result)

  world = world or endpoint.World()
  options.setdefault("k", n)
  results = [Result() for _ in range(n)]
  threads = [
    start(make(world, i, n=n, **options), wait_and_train, results[i])
    for i in range(n)
  ]
  finish(threads, limit)
  return results


def finish(threads: list[threading.Thread], limit: float = 120.0) -> None:
  """Waits for threads, and fails where one hangs."""
  for thread in threads:
    thread.join(limit)
  hanging = [t.name for t in threads if t.is_alive()]
  assert not hanging, f"{hanging} hang; threads: {threading.enumerate()}"


class Faults:
  """Interferes in phases, by a plan: (phase, replica, nth time) -> action.

  Without a replica (None), the times of all replicas count together.
  """

  def __init__(self, plan: dict[tuple[str, Any, int], Callable[[], None]]):
    self._plan = plan
    self._lock = threading.Lock()
    self._times: collections.Counter = collections.Counter()
    self.done: list[tuple[str, Any, int]] = []

  def __call__(self, phase: str, replica: Any) -> None:
    actions = []
    with self._lock:
      for who in (replica, None):
        self._times[phase, who] += 1
        key = phase, who, self._times[phase, who]
        if key in self._plan:
          self.done.append(key)
          actions.append(self._plan[key])
    for action in actions:
      action()

  def __enter__(self) -> "Faults":
    phases.listen(self)
    return self

  def __exit__(self, *error: object) -> None:
    phases.listen(None)


def kill() -> None:
  raise Killed


def records(path: pathlib.Path) -> list[dict[str, Any]]:
  return [json.loads(line) for line in path.read_text().splitlines()]


def check_journal(found: list[dict[str, Any]], k: int, late: int = 0) -> None:
  """Steps in order, each once, of enough gradients that are fresh enough."""
  commits = [r for r in found if r["kind"] == "commit"]
  assert [c["step"] for c in commits] == list(range(len(commits)))
  for commit in commits:
    members = commit["members"]
    assert sum(m["count"] for m in members) >= k
    assert [m["replica"] for m in members] == sorted(
      m["replica"] for m in members
    )
    for m in members:
      assert commit["step"] - m["local_step"] == m["staleness"]
      assert 0 <= m["staleness"] <= late
  applied = [
    (m["replica"], tuple(journal.batches(m)))
    for c in commits
    for m in c["members"]
  ]
  assert len(set(applied)) == len(applied), "a gradient was applied twice"


def replay(found: list[dict[str, Any]]) -> dict[int, str]:
  """Fingerprints after each commit, by NumPy's sums in replica order."""
  params, state, history = PARAMS, OPT.init(PARAMS), [PARAMS]
  prints = {0: fingerprint(strategies.SharedState(params, state))}
  for record in found:
    if record["kind"] != "commit":
      continue
    total = None
    gradients = 0
    for m in record["members"]:
      one = None
      for batch in journal.batches(m):
        grads = gradient(history[m["local_step"]], jnp.asarray(batch))
        grads = jax.tree.map(np.asarray, grads)
        one = grads if one is None else jax.tree.map(np.add, one, grads)
      weight = np.float32(m["weight"])
      one = jax.tree.map(lambda x, w=weight: x * w, one)
      total = one if total is None else jax.tree.map(np.add, total, one)
      gradients += m["count"]
    mean = jax.tree.map(lambda x, c=gradients: x / np.float32(c), total)
    params, state = _apply(params, state, mean)
    history.append(params)
    digest = fingerprint(strategies.SharedState(params, state))
    prints[record["step"] + 1] = digest
  return prints


@jax.jit
def _apply(params, state, mean):
  updates, state = OPT.update(mean, state, params)
  return optax.apply_updates(params, updates), state


def check_ledger(
  results: dict[int, Result], found: list[dict[str, Any]]
) -> None:
  """Every gradient of a survivor has one ending, and the journal says the same."""
  applied: collections.Counter = collections.Counter()
  for record in found:
    if record["kind"] == "commit":
      for m in record["members"]:
        applied[m["replica"]] += m["count"]
  for index, result in results.items():
    assert sum(result.counts.values()) == result.computed, (index, result)
    assert result.counts["applied"] == applied[index], (index, result.counts)


def coordinator_threads(
  before: Sequence[threading.Thread] = (), timeout: float = 60.0
) -> list[threading.Thread]:
  """Threads of replicas and coordinators that are still there after a while.

  Args:
    before: threads that are not meant: earlier tests may have left some.
    timeout: seconds that they may take to end.
  """
  end = time.monotonic() + timeout
  while True:
    left = [
      thread
      for thread in threading.enumerate()
      if thread.name.startswith("optax-dist") and thread not in before
    ]
    if not left or time.monotonic() > end:
      return left
    time.sleep(0.01)


def widening():
  """A momentum of float32 for narrower parameters, which `init` does not say."""

  def update(grads, state, params):
    wide = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    state = jax.tree.map(
      lambda m, g: 0.9 * m.astype(jnp.float32) + g / 3, state, wide
    )
    return jax.tree.map(lambda m, g: -m.astype(g.dtype), state, grads), state

  zeros = lambda params: jax.tree.map(jnp.zeros_like, params)
  return optax.GradientTransformation(zeros, update)
