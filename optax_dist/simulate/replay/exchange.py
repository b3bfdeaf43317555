"""The time of an exchange by size: latency and bandwidth, from a journal.

Replicas report how long they encoded, exchanged and applied; the journal has
the size of a gradient. Runs with different sizes separate latency and
bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from optax_dist.coordinator import journal
from optax_dist.coordinator.options import Options
from optax_dist.quorum.events import Replica
from optax_dist.simulate.network import Network, moved

# Sizes with a smaller ratio say nothing about the cost of a byte.
_APART = 1.5
# Round trips of a step between hosts: with inline messages, and with an
# exchange (benchmarks/comparison/compare.py --figure round-trips).
_ROUND_TRIPS_INLINE, _ROUND_TRIPS = 1.1, 2.8


class Line(NamedTuple):
  """A time that is linear in the number of bytes.

  Attributes:
    seconds: seconds for zero bytes.
    per_byte: seconds per byte.

  Example:
    >>> Line(0.001, 1e-9).at(1e6)
    0.002
  """

  seconds: float
  per_byte: float

  def at(self, nbytes: float) -> float:
    """Seconds for this many bytes."""
    return self.seconds + self.per_byte * nbytes


class Messages(NamedTuple):
  """Seconds of messages per step, by how gradients are sent; None: unknown."""

  inline: float | None
  exchanged: float | None

  def of(self, inline: bool) -> float:
    """The seconds of this kind, or of the other one if it is unknown."""
    known = self if inline else self[::-1]
    return next((seconds for seconds in known if seconds is not None), 0.0)


class Exchange(NamedTuple):
  """The time of a step besides computing, as a function of the bytes moved.

  Attributes:
    nbytes: size of a recorded gradient, as it was sent.
    members: median number of members of a recorded step.
    inline: whether gradients were sent inline, without an exchange.
    messages: the remaining time after the other two.
    copying: encoding and applying, by the bytes of a gradient.
    moving: the exchange, by the bytes that each replica sent and received.
    sizes: number of different sizes in the fit.
    local: whether all replicas were on one host.
  """

  nbytes: int
  members: int
  inline: bool
  messages: Messages
  copying: Line
  moving: Line
  sizes: int
  local: bool

  @property
  def network(self) -> Network:
    """The fitted network of the exchange: half of the latency is one way."""
    byte = self.moving.per_byte
    return Network(self.moving.seconds / 2, 1 / byte if byte else math.inf)

  def seconds(
    self,
    nbytes: float | None = None,
    members: int | None = None,
    network: Network | None = None,
  ) -> float:
    """Seconds for a gradient of this size.

    Args:
      nbytes: size of a gradient; None for the recorded one.
      members: members of an exchange; None for the recorded number.
      network: network between them, added to the recorded one; None for none.
    """
    nbytes = self.nbytes if nbytes is None else nbytes
    members = self.members if members is None else members
    inline = self._inline(nbytes)
    found = self.messages.of(inline) + self.copying.at(nbytes)
    if not inline:
      found += self.moving.at(_moved(nbytes, members))
    if network is not None:
      # Inline gradients all go to the leader, and the mean to all replicas.
      through = (
        2 * (max(2, members) - 1) * nbytes
        if inline
        else _moved(nbytes, members)
      )
      trips = _ROUND_TRIPS_INLINE if inline else _ROUND_TRIPS
      found += 2 * trips * network.latency + through / network.bandwidth
    return found

  def doubts(
    self, nbytes: float | None = None, network: Network | None = None
  ) -> tuple[str, ...]:
    """Why `seconds` may be wrong, one line each."""
    lines = []
    if network is not None and not self.local:
      lines.append(
        "the recorded replicas were on several hosts: the network given comes on"
        " top of theirs"
      )
    if nbytes is None or nbytes == self.nbytes:
      return tuple(lines)
    if self.messages[not self._inline(nbytes)] is None:
      how = ("exchanged", "sent with the messages")
      then = self._inline(nbytes)
      lines.append(
        f"gradients of {self.nbytes:,} bytes were {how[not then]}, those of"
        f" {nbytes:,.0f} will be {how[then]}: how long that takes is not in the"
        " journal"
      )
    elif self.sizes < 2:
      low, high = sorted((self.nbytes, nbytes))
      known = self.seconds()
      lines.append(
        "gradients of one size: how much of their"
        f" {1e3 * known:.3g} ms is for each byte is not in the journal; from"
        f" {low:,.0f} to {high:,.0f} bytes it may change by"
        f" {high / low:.3g} times, or not at all"
      )
    return tuple(lines)

  def _inline(self, nbytes: float) -> bool:
    """Whether gradients of this size are sent inline."""
    if nbytes == self.nbytes:
      return self.inline
    return nbytes <= Options.inline_bytes


def of(
  runs: Iterable[tuple[Sequence[journal.Record], float]],
) -> Exchange | None:
  """Fits recorded runs; the first one is the one that `Exchange` describes.

  Args:
    runs: runs from `journal.segments`, over the same network, each with its
      seconds of communication.

  Returns:
    The fit; None if no replica reported its timings.
  """
  copying: dict[float, list[float]] = {}
  moving: dict[float, list[float]] = {}
  rest: dict[bool, list[float]] = {True: [], False: []}
  first: tuple[int, int, bool] | None = None
  local = True
  for part, communication in runs:
    nbytes = next(
      (r["gradient_bytes"] for r in part if r.get("gradient_bytes")), None
    )
    if nbytes is None:
      continue
    members, copied, exchanged = _of_run(part)
    if not copied:
      continue
    copying.setdefault(nbytes, []).extend(copied)
    for count, seconds in exchanged:
      moving.setdefault(_moved(nbytes, count), []).append(seconds)
    known = float(np.median(copied))
    if exchanged:
      known += float(np.median([seconds for _, seconds in exchanged]))
    rest[not exchanged].append(max(0.0, communication - known))
    first = first or (nbytes, members, not exchanged)
    hosts = {
      (r["address"] or "").rpartition(":")[0]
      for r in part
      if r["kind"] == "join"
    }
    here = [h.startswith(("unix", "in-process", "127.")) for h in hosts]
    local = local and (all(here) or len(hosts) < 2)
  if first is None:
    return None
  middle = lambda values: float(np.median(values)) if values else None
  return Exchange(
    *first,
    Messages(middle(rest[True]), middle(rest[False])),
    fit(copying),
    fit(moving),
    len(copying),
    local,
  )


def fit(seconds_of: dict[float, list[float]]) -> Line:
  """Fits a line to the medians, minimizing the relative errors.

  Neither coefficient is negative. Times of a single size are ambiguous: small
  ones are attributed to the constant, large ones to the bytes.

  Args:
    seconds_of: times by number of bytes; a few outliers don't matter.

  Example:
    >>> fit({0.0: [1.0, 1.0, 99.0], 100.0: [3.0], 200.0: [5.0]})
    Line(seconds=1.0, per_byte=0.02)
  """
  points = [
    (size, float(np.median(times)), math.sqrt(len(times)))
    for size, times in sorted(seconds_of.items())
  ]
  points = [point for point in points if point[1] > 0]
  if not points:
    return Line(0.0, 0.0)
  if len(points) == 1:
    ((size, y, _),) = points
    return Line(y, 0.0) if size <= Options.inline_bytes else Line(0.0, y / size)
  # A best line in absolute deviations goes through two points, or one and zero.
  tried = [Line(y, 0.0) for _, y, _ in points]
  tried += [Line(0.0, y / x) for x, y, _ in points if x]
  for i, (x, y, _) in enumerate(points):
    for x2, y2, _ in points[i + 1 :]:
      slope = (y2 - y) / (x2 - x)
      if x2 >= _APART * x and slope >= 0 and y - slope * x >= 0:
        tried.append(Line(y - slope * x, slope))
  # Of equally good lines, the steepest.
  return min(
    reversed(tried),
    key=lambda line: sum(w * abs(line.at(x) / y - 1) for x, y, w in points),
  )


def _moved(nbytes: float, members: int) -> float:
  """Bytes of an exchange; a step of one replica also goes to another one."""
  return moved(nbytes, max(2, members))


def _of_run(
  part: Sequence[journal.Record],
) -> tuple[int, list[float], list[tuple[int, float]]]:
  """Members of a step, seconds of copying, and of exchanges by members."""
  # Members of each replica's last step: its next timings belong to that step.
  before: dict[Replica, int] = {}
  counts, copied, exchanged = [], [], []
  for record in part:
    if record["kind"] in ("join", "lost", "leave", "drop"):
      before.pop(record["replica"], None)
    if record["kind"] != "commit":
      continue
    count = len(record["members"])
    counts.append(count)
    for one in record["members"]:
      told, last = one.get("timings"), before.get(one["replica"])
      if told is not None and last is not None:
        copied.append(told["encoded"] + told["applied"])
        if told["exchanged"] > 0:
          exchanged.append((last, told["exchanged"]))
      before[one["replica"]] = count
  usual = int(np.median(counts)) if counts else 0
  return usual, copied, exchanged
