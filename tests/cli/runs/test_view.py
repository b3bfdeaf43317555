"""The data of a run's page, record by record."""

import importlib.resources
import json
import re

import pytest
import run_journals

from optax_dist.cli.runs import view
from optax_dist.coordinator import journal


def _shown(*records):
  shown = view.View("run.jsonl")
  shown.update(records)
  return shown


def _state(*records):
  return _shown(*records).state()


def _commit(step, at, *members):
  return {"kind": "commit", "time": at, "step": step, "members": list(members)}


def test_state_has_every_field_that_the_page_shows(tmp_path):
  page = importlib.resources.files("optax_dist.cli.runs.web") / "page.html"
  # All but the name of the file.
  names = set(re.findall(r"\bstate\.(\w+)", page.read_text("utf-8"))) - {"json"}
  assert len(names) > 5
  run = journal.read(run_journals.ended(tmp_path / "run.jsonl")).records
  for records in ((), run):
    state = _state(*records)
    assert names <= set(json.loads(json.dumps(state, allow_nan=False)))
  assert (state["ended"], state["strategy"]) == ("finished", "sync_replicas")
  empty = _state()
  assert (empty["members"], empty["goodput"], empty["restarts"]) == (
    [],
    None,
    0,
  )


def test_end_of_a_process_is_an_event():
  process = {"kind": "process", "time": 2.0, "replica": 1, "host": "h"}
  process |= {"pid": 7, "ended": None}
  killed = process | {"ended": "was ended by SIGKILL"}
  state = _state({"kind": "join", "time": 0.0, "replica": 1}, process, killed)
  assert [event["text"] for event in state["events"]] == [
    "replica 1 process 7 on h was ended by SIGKILL",
    "replica 1 joined",
  ]
  assert state["members"][0]["process"] == "h: 7"


def test_timeline_has_the_categories_of_a_report():
  member = run_journals.member("a", 0, age=0.25, compute=0.5)
  drop = {"kind": "drop", "time": 4.0, "replica": 1, "reason": "stale"}
  drop |= {"count": 1, "age": 0.0, "compute": 1.5}
  assert _state(_commit(0, 2.25, member), drop)["spans"] == [
    {"replica": "1", "begin": 0.0, "end": 2.5, "category": "start"},
    {"replica": "1", "begin": 2.5, "end": 4.0, "category": "dropped"},
    {"replica": "a", "begin": 0.0, "end": 1.5, "category": "start"},
    {"replica": "a", "begin": 1.5, "end": 2.0, "category": "useful"},
  ]


def test_resumed_run_is_drawn_from_its_last_start():
  member = run_journals.member(0, 0, age=0.5)
  run = {"kind": "run", "time": 0.0, "step": 2, "unix_time": None}
  run |= {"strategy": "sync_replicas"}
  shown = _shown(
    *(_commit(step, 1.0 + step, member) for step in range(2)),
    run,
    _commit(2, 9.0, run_journals.member(0, 2, age=0.5)),
  )
  state = shown.state()
  assert state["step"] == 3
  # The time from the last step of the former run to this one's first is none.
  assert state["steps"] == []
  assert [span["end"] for span in state["spans"]] == [8.0, 8.5]
  # Earlier events are still listed.
  assert [event["text"] for event in state["events"]] == ["run started"]
  shown.update([_commit(3, 9.5)])
  assert shown.state()["steps"] == [(9.5, 0.5)]


def test_members_are_in_the_order_of_their_numbers():
  joins = [
    {"kind": "join", "time": 0.0, "replica": replica}
    for replica in (10, "b", 2, 1, "a")
  ]
  members = [m["replica"] for m in _state(*joins)["members"]]
  assert members == ["1", "2", "10", "a", "b"]


@pytest.mark.parametrize(
  ("record", "text"),
  [
    ({"kind": "run", "step": 0, "unix_time": None}, "run started"),
    ({"kind": "coordinator", "epoch": 1}, "coordinator started"),
    ({"kind": "join", "replica": "a"}, "replica a joined"),
    (
      {"kind": "lost", "replica": 3, "reason": "silent"},
      "replica 3 lost: silent",
    ),
    (
      {"kind": "stall", "waited": 9.0, "missing": {"absent": [1]}},
      "waiting for replica 1",
    ),
    (
      {"kind": "cannot_proceed", "missing": [2, "b"]},
      "can't go on without replica 2, b",
    ),
    ({"kind": "cannot_proceed", "missing": []}, "can't go on without others"),
    ({"kind": "abandon"}, "aggregation round abandoned"),
    ({"kind": "finish", "reason": "all left"}, "run ended: all left"),
  ],
)
def test_events_have_readable_texts(record, text):
  record = {"time": 1.5, "strategy": "s"} | record
  (event,) = _state(record)["events"]
  assert (event["time"], event["kind"]) == (1.5, record["kind"])
  assert event["text"] == text
  assert event["replica"] == str(record.get("replica", ""))
