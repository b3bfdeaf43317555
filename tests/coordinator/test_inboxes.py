"""Which way messages to the chief take."""

import dataclasses

import near_engines
import pytest

from optax_dist.coordinator import board_log, embedded, inboxes, near_inbox


@near_engines.needs_notes
def test_both_ends_choose_alike():
  with near_engines.near() as near:
    one, two = near.one, near.two
    for here, there in ((one, two), (two, one)):
      chosen = inboxes.inbox(here, b"s", 0, 1, there.exchange.address)
      assert isinstance(chosen, near_inbox.NearInbox)
    # One of them shares no memory.
    far = dataclasses.replace(two, notes=None)
    for here, there in ((one, '[null,"127.0.0.1:1"]'), (far, one)):
      address = there if isinstance(there, str) else there.exchange.address
      chosen = inboxes.inbox(here, b"s", 0, 1, address)
      assert isinstance(chosen, board_log.Inbox)
    assert isinstance(inboxes.inbox(one, b"s", 0, 1, None), board_log.Inbox)


def test_threads_of_one_process_need_no_notes():
  world = embedded.World()
  one, two = world.connect("one"), world.connect("two")
  chosen = inboxes.inbox(one, b"s", 0, 1, two.exchange.address)
  assert isinstance(chosen, board_log.Inbox)


@pytest.mark.parametrize("incarnation", [None, 1])
def test_what_is_cleared_is_gone_either_way(incarnation):
  board = embedded.World().connect("one").board
  for way in ("in", "near"):
    for key in ("2/1/0", "2/1/5", "2/3/0", "3/1/0"):
      board.put(f"{way}/{key}", b"")
  inboxes.clear(board, 2, incarnation)
  left = ["3/1/0"] if incarnation is None else ["2/3/0", "3/1/0"]
  for way in ("in", "near"):
    assert sorted(board.items(way)) == [f"{way}/{key}" for key in left]
