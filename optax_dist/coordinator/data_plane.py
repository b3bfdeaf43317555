"""Members aggregate among themselves: reduce-scatter, then gather.

Of k members each fetches one slice of every gradient, averages it, and offers
the mean; everyone then fetches the k mean slices. A member moves 2P(k-1)/k
bytes in, a replica that is not one P.
"""

from __future__ import annotations

import collections
import concurrent.futures
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from optax_dist.coordinator import engine, messages, phases, view
from optax_dist.coordinator.aggregation import layout as layouts
from optax_dist.coordinator.aggregation import means
from optax_dist.coordinator.aggregation import wire_formats as wires

# Means are kept for replicas that are a little late.
KEPT = 2


class Member(NamedTuple):
  """A gradient in an attempt, as the log has it.

  Attributes:
    incarnation: whose.
    replica: its id.
    local_step: the step of the parameters it was computed on.
    gradients: how many are summed in it.
    weight: what it counts for.
    staleness: how many steps late it is.
    sequence: the sender's number of it.
  """

  incarnation: int
  replica: Any
  local_step: int
  gradients: int
  weight: float
  staleness: int
  sequence: int


class AttemptFailed(RuntimeError):
  """An aggregation could not be finished.

  Attributes:
    culprit: the incarnation of whom it failed for; None: nobody's fault.
  """

  def __init__(self, culprit: int | None, reason: str):
    super().__init__(reason)
    self.culprit = culprit


class Mean(NamedTuple):
  """A mean whose slices have arrived.

  Attributes:
    leaves: its leaves; perhaps in the memory of peers.
    check: raises `OfferGone` if that memory has been overwritten.
  """

  leaves: list[np.ndarray]
  check: Callable[[], None]


class DataPlane:
  """One replica's side of all aggregations."""

  def __init__(
    self,
    exchange: engine.Exchange,
    secret: bytes,
    template: Sequence[Any],
    wire: str,
  ):
    self._exchange = exchange
    self._secret = secret
    self.place = layouts.layout(template, wire)
    self.mean_place = layouts.layout(
      template, wires.mean_wire(wire), like=self.place
    )
    self._scratch = np.empty(0, np.uint8)
    self._means: collections.deque[np.ndarray] = collections.deque()
    self._pool: concurrent.futures.ThreadPoolExecutor | None = None
    # int8 loses much; what is lost is sent with the next gradient.
    self._error = (
      np.zeros(self.place.elements, np.float32) if wire == "int8" else None
    )
    self._next_error: np.ndarray | None = None

  def write(self, leaves: Sequence[Any]) -> tuple[np.ndarray, bool]:
    """Encodes a gradient into memory to offer; returns it, and if finite."""
    buffer = self._exchange.buffer(self.place.nbytes)
    if self._error is not None:
      self._next_error = self._error.copy()
    return buffer, means.write(leaves, self.place, buffer, self._next_error)

  def settle(self, buffer: np.ndarray, applied: bool) -> None:
    """The gradient's fate is known: its memory is free again."""
    if applied and self._next_error is not None:
      self._error = self._next_error
    self._next_error = None
    self._exchange.recycle(buffer)

  def inline_mean(
    self, gradients: Sequence[bytes], members: Sequence[Member]
  ) -> bytes:
    """The mean of gradients that rode in messages, to ride in one."""
    out = np.empty(self.mean_place.nbytes, np.uint8)
    self._average(
      [np.frombuffer(g, np.uint8) for g in gradients],
      members,
      (0, self.place.elements),
      out,
    )
    return out.tobytes()

  def read_inline(self, payload: bytes) -> list[np.ndarray]:
    """The leaves of such a mean."""
    raw = np.frombuffer(payload, np.uint8)
    if raw.size != self.mean_place.nbytes:
      raise messages.BadMessage(f"a mean of {raw.size} bytes")
    return self._read([raw], (0, self.mean_place.elements))

  def aggregate(
    self,
    me: int,
    buffer: np.ndarray,
    entry: dict[str, Any],
    peers: dict[int, view.Peer],
    timeout: float,
    cancelled: Callable[[], bool],
    replica: Any = None,
  ) -> Mean:
    """A member's part of an attempt.

    Raises:
      AttemptFailed: a member's bytes did not come.
    """
    phases.reach("reduce_scatter", replica)
    until = time.monotonic() + timeout
    members = [Member(*m) for m in entry["members"]]
    step, attempt = entry["step"], _attempt(entry)
    cuts = self.place.cuts(len(members))
    own = [m.incarnation for m in members].index(me)
    everyone = [m.incarnation for m in members] + list(entry["audience"])
    readers = [peers[i].address for i in everyone if i != me and i in peers]
    for j, member in enumerate(members):
      first, last = self.place.bytes_of(cuts[j], cuts[j + 1])
      if j != own and last > first:
        number = self._ticket("gradient", step, attempt, me, j)
        address = _address(peers, member.incarnation)
        self._exchange.offer(number, buffer[first:last], [address])
    first, last = self.place.bytes_of(cuts[own], cuts[own + 1])
    wanted = [
      (
        m.incarnation,
        self._ticket("gradient", step, attempt, m.incarnation, own),
      )
      for m in members
      if m.incarnation != me
    ]
    fetched = self._fetch(
      wanted, [last - first] * len(wanted), peers, timeout, cancelled
    )
    slices = [
      buffer[first:last]
      if m.incarnation == me
      else fetched[m.incarnation].array
      for m in members
    ]
    low, high = self.mean_place.bytes_of(cuts[own], cuts[own + 1])
    out = self._exchange.buffer(high - low)
    self._average(slices, members, (cuts[own], cuts[own + 1]), out)
    for incarnation, got in fetched.items():
      self._checked(got, incarnation)
    self._keep(out, entry.get("lag", 0))
    if high > low:
      number = self._ticket("mean", step, attempt, me, own)
      self._exchange.offer(number, out, readers)
    phases.reach("gather", replica)
    left = max(0.0, until - time.monotonic())
    return self._gather(
      step, attempt, members, cuts, peers, left, cancelled, (me, out)
    )

  def collect(
    self,
    entry: dict[str, Any],
    peers: dict[int, view.Peer],
    timeout: float,
    cancelled: Callable[[], bool],
  ) -> Mean:
    """What a replica that is no member fetches of an attempt's outcome.

    Raises:
      AttemptFailed: a slice did not come, or is there no more.
    """
    members = [Member(*m) for m in entry["members"]]
    cuts = self.place.cuts(len(members))
    return self._gather(
      entry["step"], _attempt(entry), members, cuts, peers, timeout, cancelled
    )

  def _gather(
    self,
    step: int,
    attempt: tuple[int, int],
    members: Sequence[Member],
    cuts: Sequence[int],
    peers: dict[int, view.Peer],
    timeout: float,
    cancelled: Callable[[], bool],
    own: tuple[int, np.ndarray] | None = None,
  ) -> Mean:
    wanted, sizes = [], []
    for j, member in enumerate(members):
      first, last = self.mean_place.bytes_of(cuts[j], cuts[j + 1])
      if own is None or member.incarnation != own[0]:
        incarnation = member.incarnation
        number = self._ticket("mean", step, attempt, incarnation, j)
        wanted.append((incarnation, number))
        sizes.append(last - first)
    fetched = self._fetch(wanted, sizes, peers, timeout, cancelled)
    slices = [
      own[1]
      if own and m.incarnation == own[0]
      else fetched[m.incarnation].array
      for m in members
    ]

    def check() -> None:
      for incarnation, got in fetched.items():
        self._checked(got, incarnation)

    return Mean(self._read(slices, cuts), check)

  def _fetch(
    self,
    wanted: Sequence[tuple[int, int]],
    sizes: Sequence[int],
    peers: dict[int, view.Peer],
    timeout: float,
    cancelled: Callable[[], bool],
  ) -> dict[int, engine.Fetched]:
    def one(incarnation: int, number: int, nbytes: int) -> engine.Fetched:
      if not nbytes:
        return engine.Fetched(np.empty(0, np.uint8), lambda: None)
      try:
        address = _address(peers, incarnation)
        return self._exchange.fetch(address, number, nbytes, timeout, cancelled)
      except engine.EngineTimeout:
        raise AttemptFailed(incarnation, f"silent for {timeout:g} s") from None
      except engine.PeerLost as error:
        raise AttemptFailed(incarnation, f"lost ({error})") from None

    tasks = [
      (who, number, size)
      for (who, number), size in zip(wanted, sizes, strict=True)
    ]
    if len(tasks) < 2:
      return {task[0]: one(*task) for task in tasks}
    if self._pool is None:
      self._pool = concurrent.futures.ThreadPoolExecutor(
        8, thread_name_prefix="optax-dist-fetch"
      )
    futures = {task[0]: self._pool.submit(one, *task) for task in tasks}
    concurrent.futures.wait(futures.values())
    return {who: future.result() for who, future in futures.items()}

  def _average(
    self,
    slices: Sequence[np.ndarray],
    members: Sequence[Member],
    cut: tuple[int, int],
    out: np.ndarray,
  ) -> None:
    # What lies between leaves, or has been overwritten, may be anything.
    with np.errstate(all="ignore"):
      means.mean_slice(
        slices,
        [m.weight for m in members],
        sum(m.gradients for m in members),
        self.place,
        self.mean_place,
        *cut,
        out,
      )

  def _read(
    self, slices: Sequence[np.ndarray], cuts: Sequence[int]
  ) -> list[np.ndarray]:
    if not self._scratch.size:
      self._scratch = np.empty(self.mean_place.nbytes, np.uint8)
    return means.read(self.mean_place, slices, cuts, self._scratch)

  def _checked(self, got: engine.Fetched, incarnation: int) -> None:
    try:
      got.check()
    except (engine.OfferGone, engine.PeerLost) as error:
      raise AttemptFailed(incarnation, str(error)) from None

  def _keep(self, out: np.ndarray, lag: int) -> None:
    self._means.append(out)
    while len(self._means) > KEPT + lag:
      self._exchange.recycle(self._means.popleft())

  def _ticket(self, *parts: Any) -> int:
    return messages.ticket(self._secret, *parts)

  def close(self) -> None:
    """Ends its threads."""
    if self._pool is not None:
      self._pool.shutdown(wait=False, cancel_futures=True)


def _attempt(entry: dict[str, Any]) -> tuple[int, int]:
  """An attempt's number; each chief counts anew, and offers stay for a while."""
  return entry.get("term", 0), entry["attempt"]


def _address(peers: dict[int, view.Peer], incarnation: int) -> str:
  if incarnation not in peers:
    raise AttemptFailed(incarnation, "gone")
  return peers[incarnation].address
