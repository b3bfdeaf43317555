"""Tests of the output about a run: the live table and the picture."""

import io
import json
import threading
import time

import matplotlib.image
import pytest
import rich.console

from optax_dist.cli import main
from optax_dist.cli.runs import summary as run_summary
from optax_dist.cli.runs import table as run_table
from optax_dist.cli.runs import timeline_picture
from optax_dist.coordinator import journal


def _member(replica, step, arrived, compute=0.5):
  return {
    "replica": replica,
    "incarnation": replica,
    "local_step": step,
    "staleness": 0,
    "count": 1,
    "weight": 1.0,
    "batches": [[replica, step]],
    "compute": compute,
    "arrived": arrived,
  }


def _begin(written, replicas=3):
  written.write("run", strategy="sync_replicas", step=0)
  written.write("leader", replica=0, term=0, step=0, time=0.0)
  for replica in range(replicas):
    written.write(
      "join", replica=replica, incarnation=replica, step=0, time=0.1
    )


def _commit(written, step, *replicas, at):
  written.write(
    "commit",
    step=step,
    attempt=1,
    members=[_member(r, step, at - 0.2) for r in replicas],
    time=at,
  )


@pytest.fixture
def path(tmp_path):
  path = tmp_path / "run.jsonl"
  with journal.Journal(path) as written:
    _begin(written)
    for step in range(4):
      _commit(written, step, 0, 1, at=1.0 + step)
      written.write(
        "drop",
        step=step + 1,
        replica=2,
        incarnation=2,
        local_step=step,
        count=1,
        reason="stale",
        compute=0.9,
        arrived=1.1 + step,
        time=1.1 + step,
      )
    written.write("lost", replica=1, incarnation=1, step=4, time=5.0)
    written.write("finish", step=4, reason="finished", time=6.0)
  return path


def test_the_summary_counts_by_replica(path):
  summary = run_summary.RunSummary()
  summary.update(journal.read(path).records)
  assert summary.step == 4
  assert summary.rate() == pytest.approx(1.0)
  assert [summary.replicas[i].accepted for i in range(3)] == [4, 4, 0]
  assert summary.replicas[2].dropped == {"stale": 4}
  assert [summary.replicas[i].state for i in range(3)] == ["in", "lost", "in"]
  assert summary.replicas[0].wait == pytest.approx(0.2)
  assert summary.now() == 6.0
  assert summary.waiting_for() == ""
  # A resumed run starts over.
  summary.update([{"kind": "run", "time": 0.0, "step": 2, "unix_time": None}])
  assert (summary.step, summary.replicas) == (2, {})


def test_who_is_waited_for_is_told(tmp_path):
  path = tmp_path / "run.jsonl"
  with journal.Journal(path, unix_clock=lambda: time.time() - 60) as written:
    _begin(written)
    for step in range(3):
      _commit(written, step, 0, 1, 2, at=1.0 + step)
    summary = run_summary.RunSummary()
    summary.update(journal.read(path).records)
    assert summary.waiting_for().startswith("replica 0, 1, 2, for 5")
    missing = {"computing": [2], "reporting": [], "absent": []}
    written.write("stall", step=3, waited=10.0, missing=missing, time=13.0)
    summary.update(journal.read(path).records[-1:])
    assert summary.waiting_for().startswith("replica 2, for 5")


def test_it_is_shown_once_with_a_picture(path, tmp_path, capsys):
  picture = tmp_path / "timeline.png"
  assert main.main(["watch", str(path), "--once", "--save", str(picture)]) == 0
  shown = capsys.readouterr().out
  assert "step 4, 1.0 steps/s, leader 0 (term 1); ended: finished" in shown
  row = next(line for line in shown.splitlines() if line.startswith(" 2 "))
  assert row.split()[:5] == ["2", "in", "0", "4", "0"]
  assert "4 stale" in row
  assert matplotlib.image.imread(picture).size


def test_deadlines_are_shown(path, capsys):
  with path.open("a") as file:
    deadlines = {"attempt": 7.0, "silence": {"2": 12.0}}
    record = {"kind": "deadlines", "time": 5.0} | deadlines
    file.write(json.dumps(record) + "\n")
  assert main.main(["watch", str(path), "--once"]) == 0
  shown = capsys.readouterr().out
  assert "an attempt may take 7 s" in shown
  row = next(line for line in shown.splitlines() if line.startswith(" 2 "))
  assert "12 s" in row


def test_it_follows_a_run_until_its_end(tmp_path):
  path = tmp_path / "run.jsonl"
  codes = []
  with journal.Journal(path) as written:
    _begin(written)
    follower = threading.Thread(
      target=lambda: codes.append(main.main(["watch", str(path)]))
    )
    follower.start()
    try:
      time.sleep(0.5)
      assert follower.is_alive()
    finally:
      written.write("finish", step=0, reason="finished")
      follower.join(60.0)
  assert codes == [0]


def test_bad_lines_are_counted(path, capsys):
  with path.open("ab") as file:
    file.write(b"nonsense\n")
  assert main.main(["watch", "--once", str(path)]) == 0
  assert "bad lines: 1;" in capsys.readouterr().err
  with journal.Journal(path) as written:
    written.write("finish", step=4, reason="finished")
  assert main.main(["watch", str(path)]) == 0
  assert "bad lines: 1;" in capsys.readouterr().err


def test_a_terminal_gets_a_table_and_a_file_gets_lines(path):
  terminal, plain = io.StringIO(), io.StringIO()
  for file, is_terminal in ((terminal, True), (plain, False)):
    console = rich.console.Console(
      file=file, force_terminal=is_terminal, width=120
    )
    with run_table.Live(path, 9, console) as live:
      live.update()
      live.update(force=True)
  assert "step 4 of 9" in terminal.getvalue()
  assert plain.getvalue().splitlines() == [
    "step 4/9  1.0 steps/s  2 replicas  4 dropped  1 lost"
  ]


def test_a_journal_that_is_not_there_is_told(tmp_path, capsys):
  assert main.main(["watch", str(tmp_path / "no.jsonl")]) == 2
  assert "there is no such journal" in capsys.readouterr().err
  assert main.main(["watch", str(tmp_path), "--once"]) == 2
  assert "can't be read: Is a directory" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["-1", "70000", "abc"])
def test_a_port_that_is_none_is_told(path, port, capsys):
  assert main.main(["watch", str(path), "--web", port]) == 2
  assert "from 0 to 65535" in capsys.readouterr().err


def test_a_run_of_which_nothing_is_known_has_a_picture(tmp_path, capsys):
  empty, picture = tmp_path / "run.jsonl", tmp_path / "run.png"
  empty.touch()
  args = ["watch", str(empty), "--once", "--save", str(picture)]
  assert main.main(args) == 0
  assert picture.stat().st_size > 1000
  # The least that a line of each kind may tell.
  run = {"kind": "run", "time": 0, "version": 1, "strategy": "s", "step": 0}
  member = {"replica": 0, "local_step": 0, "count": 1}
  member |= {"staleness": 0, "weight": 1.0}
  commit = {"kind": "commit", "time": 1, "step": 0, "attempt": 0}
  commit |= {"members": [member]}
  empty.write_text(f"{json.dumps(run)}\n{json.dumps(commit)}\n")
  assert main.main(args) == 0
  assert "step 1" in capsys.readouterr().out


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_narrow_terminal_gets_fewer_columns_and_cuts_none(path, width):
  summary = run_summary.RunSummary()
  summary.update(journal.read(path).records)
  console = rich.console.Console(
    file=io.StringIO(), width=width, force_terminal=True, color_system=None
  )
  console.print(run_table.table(summary, width=width))
  printed = console.file.getvalue()
  assert "\N{HORIZONTAL ELLIPSIS}" not in printed
  assert "accepted" in printed
  assert ("dropped as" in printed) == (width == 120)


def test_lost_gradients_are_not_green():
  colors = timeline_picture._REASONS
  assert len(set(colors.values())) == len(colors)
  red, green, blue = (int(colors["lost"][i : i + 2], 16) for i in (1, 3, 5))
  assert green < max(red, blue) / 2
