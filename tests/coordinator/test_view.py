"""Who takes part, as the log says it."""

import json

from optax_dist.coordinator import view as views


def after(*entries, start=None):
  view = start or views.View()
  for entry in entries:
    view.update(entry)
  return view


def gone(incarnation, reason):
  return {"kind": "gone", "incarnation": incarnation, "reason": reason}


def members():
  view = after(
    {"kind": "term", "term": 0, "incarnation": 0, "step": 3, "address": "a"}
  )
  for number, replica in enumerate([0, "b", 2]):
    view.admit(views.Peer(number, replica, f"address-{number}"))
  return view


def test_a_newcomer_learns_all_of_it_from_its_admission():
  view = after(gone(1, "its process has ended"), start=members())
  dumped = json.loads(json.dumps(view.dump()))
  copy = after({"kind": "join", "view": dumped})
  for name in ("term", "chief", "step", "peers", "gone", "hellos"):
    assert getattr(copy, name) == getattr(view, name), name
  assert copy.gone == {"b": "lost"}


def test_commits_move_the_step_and_terms_never_back():
  view = after({"kind": "commit", "step": 3}, start=members())
  assert view.step == 4
  after(
    {"kind": "term", "term": 1, "incarnation": 2, "step": 1, "address": "b"},
    start=view,
  )
  assert (view.step, view.term, view.chief) == (4, 1, 2)
  after({"kind": "resign"}, start=view)
  assert view.chief is None


def test_a_chief_that_leaves_is_chief_no_more():
  assert after(gone(0, "left"), start=members()).chief is None
  # It may have given up its own replica, and go on.
  assert after(gone(0, "stuck"), start=members()).chief == 0


def test_a_replica_that_comes_again_has_one_place():
  view = after(gone(1, "left"), start=members())
  assert view.gone == {"b": "left"}
  view.admit(views.Peer(5, "b", "new"))
  view.admit(views.Peer(6, 2, "new"))
  assert not view.gone
  assert sorted(view.peers) == [0, 5, 6]
  assert view.hellos == 7
  assert view.name(5) == "replica b"
  assert view.name(1) == view.name(None) == "a replica that is gone"


def test_requests_that_were_refused_are_answered_too():
  assert after({"kind": "refuse", "incarnation": 8}).hellos == 9
