"""The sum of a step is one tree, whichever replica adds up which slots."""

import random

import pytest

from optax_dist.ledger import spans as sp
from optax_dist.ledger import tree


def expression(count):
  """The sum of a step as text, by the definition of its nodes."""

  def node(level, i):
    if i << level >= count:
      return None
    if level == 0:
      return str(i)
    left, right = node(level - 1, 2 * i), node(level - 1, 2 * i + 1)
    return left if right is None else f"({left}+{right})"

  return node((count - 1).bit_length(), 0)


def add(rows, texts, wanted):
  """The texts of wanted nodes, by the additions of the rows."""
  texts = list(texts)
  for left, right in tree.additions(rows, wanted):
    texts[left] = f"({texts[left]}+{texts[right]})"
  by_start = {row[0]: text for row, text in zip(rows, texts, strict=True)}
  return [by_start[start] for start, _ in wanted]


def sum_of(own, count, rng):
  """The nodes of a replica that adds its slots one by one, in any order."""
  slots = list(own)
  rng.shuffle(slots)
  spans, texts = (), []
  for slot in slots:
    rows = (*spans, (slot, slot + 1))
    spans = tree.nodes(sp.union(rows), count)
    texts = add(rows, [*texts, str(slot)], spans)
  return spans, texts


@pytest.mark.parametrize("count", [*range(1, 20), 31, 32, 33, 64, 67])
def test_sum_does_not_depend_on_assignment_or_order(count):
  rng = random.Random(count)
  for _ in range(30):
    replicas = rng.randint(1, 5)
    owner = [rng.randrange(replicas) for _ in range(count)]
    rows, texts = [], []
    for replica in rng.sample(range(replicas), replicas):
      own = [slot for slot in range(count) if owner[slot] == replica]
      spans, some = sum_of(own, count, rng)
      rows += spans
      texts += some
    order = tree.whole(rows, count)
    for left, right in order:
      texts[left] = f"({texts[left]}+{texts[right]})"
    root = order[-1][0] if order else 0
    assert texts[root] == expression(count)


@pytest.mark.parametrize(
  ("rows", "wanted", "message"),
  [
    ([(0, 1), (2, 4)], [(0, 4)], r"don't make up the node \(1, 2\)"),
    ([(0, 2), (0, 1)], [(0, 2)], "A slot is in two"),
    ([(0, 2), (2, 4), (1, 2)], [(0, 4)], "are more than"),
    ([(0, 4)], [(0, 2)], r"don't make up the node \(0, 2\)"),
    ([(1, 3), (0, 1), (3, 4)], [(0, 4)], r"don't make up the node \(1, 2\)"),
  ],
)
def test_mismatched_nodes_are_refused(rows, wanted, message):
  with pytest.raises(ValueError, match=message):
    tree.additions(rows, wanted)
