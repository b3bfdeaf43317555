"""Ranges of positions, as pairs of start and stop.

Most functions take and return *sorted* spans: in order, disjoint and non-empty.
A lease keeps the order in which its replica draws the samples.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

Span: TypeAlias = tuple[int, int]
Spans: TypeAlias = tuple[Span, ...]


def size(spans: Iterable[Span]) -> int:
  """The number of positions.

  Example:
    >>> size(((0, 4), (8, 10)))
    6
  """
  total = 0
  for start, stop in spans:
    total += stop - start
  return total


def union(*parts: Iterable[Span]) -> Spans:
  """The union of positions, sorted.

  Example:
    >>> union(((4, 6), (0, 2)), ((2, 3),))
    ((0, 3), (4, 6))
  """
  every = [span for part in parts for span in part]
  every.sort()
  merged: list[Span] = []
  for start, stop in every:
    if start >= stop:
      continue
    if merged and start <= merged[-1][1]:
      merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
    else:
      merged.append((start, stop))
  return tuple(merged)


def minus(spans: Spans, others: Iterable[Span]) -> Spans:
  """The positions of sorted spans that are not in others.

  Example:
    >>> minus(((0, 10),), ((2, 3), (9, 12)))
    ((0, 2), (3, 9))
  """
  for a, b in others:
    if a >= b:
      continue
    rest: list[Span] = []
    for start, stop in spans:
      if start < a:
        rest.append((start, min(a, stop)))
      if b < stop:
        rest.append((max(b, start), stop))
    spans = tuple(rest)
  return spans


def common(spans: Spans, others: Spans) -> Spans:
  """The positions of sorted spans that are in others, too.

  Example:
    >>> common(((0, 4), (6, 8)), ((3, 7),))
    ((3, 4), (6, 7))
  """
  return minus(spans, minus(spans, others))


def overlap(spans: Iterable[Span], others: Spans) -> bool:
  """Whether any position is in both.

  Example:
    >>> overlap(((0, 2),), ((2, 3),)), overlap(((0, 3),), ((2, 3),))
    (False, True)
  """
  return any(max(a, c) < min(b, d) for a, b in spans for c, d in others)


def head(spans: Iterable[Span], count: int) -> tuple[Spans, Spans]:
  """Splits off the first positions, keeping the order.

  Example:
    >>> head(((0, 4), (8, 10)), 5)
    (((0, 4), (8, 9)), ((9, 10),))
  """
  first: list[Span] = []
  rest: list[Span] = []
  for start, stop in spans:
    taken = min(stop - start, count)
    count -= taken
    if taken:
      first.append((start, start + taken))
    if start + taken < stop:
      rest.append((start + taken, stop))
  return tuple(first), tuple(rest)


def tail(spans: Spans, count: int) -> Spans:
  """The last positions, in order.

  Example:
    >>> tail(((0, 4), (8, 10)), 3)
    ((3, 4), (8, 10))
  """
  return head(spans, size(spans) - count)[1]


def join(*parts: Iterable[Span]) -> Spans:
  """Concatenates spans in this order, merging adjacent ones.

  Example:
    >>> join(((8, 9),), ((9, 12), (0, 2)))
    ((8, 12), (0, 2))
  """
  merged: list[Span] = []
  for part in parts:
    for start, stop in part:
      if merged and merged[-1][1] == start:
        merged[-1] = (merged[-1][0], stop)
      elif start < stop:
        merged.append((start, stop))
  return tuple(merged)
