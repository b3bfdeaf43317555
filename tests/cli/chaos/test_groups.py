"""Replicas of several processes, killed by the command."""

import json
import os
import types

import descriptors

from optax_dist.cli import main
from optax_dist.cli.chaos import groups


def test_messages_are_read_from_descriptors_with_large_numbers(tmp_path):
  made = groups.Groups(tmp_path)
  read, write = os.pipe()
  os.write(write, b"{}")
  with descriptors.high(read) as number:
    one = types.SimpleNamespace(
      pid=1,
      fileno=lambda: number,
      read=lambda: ([{"event": "step", "step": 3, "print": "a"}], False),
    )
    made.everyone = [groups.Process(one, 0, 0, 0)]
    made._look()
  assert made.everyone[0].step == 3
  os.close(read)
  os.close(write)


def test_processes_are_killed_and_the_table_is_printed(tmp_path, capsys):
  report = tmp_path / "report.json"
  code = main.main(
    [
      *("chaos", "--processes-per-replica", "2", "--seeds", "13:15"),
      *("--json", str(report), "--output", str(tmp_path / "kept")),
    ]
  )
  out = capsys.readouterr().out
  assert code == 0, out
  rows = json.loads(report.read_text())
  assert [(r["phase"], r["who"]) for r in rows] == [
    ("reduce_scatter", "1.1"),
    ("gather", "0.0"),
  ]
  assert all(r["outcome"] == "ok" for r in rows)
  assert "2 ok, 0 hangs, 0 wrong, 0 not struck" in out
  kept = (tmp_path / "kept" / "run-1.jsonl").read_text().splitlines()
  commits = [r for r in map(json.loads, kept) if r["kind"] == "commit"]
  members = {tuple(m["replica"] for m in r["members"]) for r in commits}
  # Each was alone while the other one came back.
  assert members == {(0,), (1,), (0, 1)}
