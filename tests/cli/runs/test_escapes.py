"""Nothing in a journal reaches a terminal but as text that is shown."""

import json
import sys

import pytest
import run_journals

from optax_dist.cli import main
from optax_dist.coordinator import journal

# Clears the screen, sets the title, a colour in one character, right to left.
_EVIL = "\x1b[2J\x1b]0;mine\x07\x9b31m\u202e\r\x00"


def _evil(value, key=None):
  """A record whose texts all have it, but for those that say what is what."""
  if isinstance(value, dict):
    return {k: _evil(v, k) for k, v in value.items()}
  if isinstance(value, list):
    return [_evil(x) for x in value]
  if key == "replica":
    return f"{value}{_EVIL}"
  if isinstance(value, str) and key not in ("kind", "batches"):
    return value + _EVIL
  return value


@pytest.fixture
def path(tmp_path):
  """A journal with each kind of text."""
  path = run_journals.ended(tmp_path / "run.jsonl")
  journal.add(path, "process", replica=2, host="h", pid=7, ended="was ended")
  with journal.Journal(path) as written:
    written.write("lost", replica=2, incarnation=0, reason="silent", step=4)
    written.write(
      "stall",
      step=4,
      waited=9.0,
      missing={"computing": [f"1{_EVIL}"], f"not{_EVIL}": [2]},
    )
  records = [json.loads(x) for x in path.read_text().splitlines()]
  lines = [json.dumps(_evil(record)) for record in records]
  # Lines that are none, for what is said of them.
  lines += [_EVIL, f'"{_EVIL}"', f'{{"kind": "{_EVIL}"}}']
  lines += [json.dumps({"kind": "run", "time": 0, "step": 0, "version": _EVIL})]
  lines += [json.dumps({"kind": "join", "time": 9, "step": _EVIL})]
  path.write_text("\n".join(lines) + "\n")
  return path


def _is_clean(text):
  assert all(line.isprintable() for line in text.split("\n")), ascii(text)
  return text


@pytest.mark.parametrize(
  "arguments",
  [
    ["watch", "--once"],
    ["report"],
    ["simulate", "--journal"],
    ["plan", "--replicas", "2", "--journal"],
  ],
)
def test_commands_print_no_escapes(path, capsys, arguments):
  main.main([*arguments, str(path)])
  shown = capsys.readouterr()
  # It is said that it is there, and what is printed is no traceback.
  wanted = "no recommendation" if arguments[0] == "plan" else r"\x1b[2J"
  assert wanted in _is_clean(shown.out) + _is_clean(shown.err)


def test_replica_names_with_escapes_are_escaped(tmp_path, capsys):
  path = run_journals.simulated(tmp_path / "run.jsonl")
  records = [json.loads(x) for x in path.read_text().splitlines()]
  for record in records:
    for one in (record, *record.get("members", ())):
      if "replica" in one:
        one["replica"] = f"{one['replica']}{_EVIL}"
  path.write_text("".join(json.dumps(r) + "\n" for r in records))
  for command in (["report"], ["simulate", "--journal"], ["watch", "--once"]):
    # The journal is too short to simulate it.
    code = 1 if command[0] == "simulate" else 0
    assert main.main([*command, str(path)]) == code
    shown = capsys.readouterr()
    _is_clean(shown.out)
    _is_clean(shown.err)


def test_escapes_in_a_followed_journal_are_escaped(path, capsys, monkeypatch):
  monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
  with path.open("a") as file:
    file.write(
      '{"kind": "finish", "time": 99, "step": 4, "reason": "\\u001b[2J"}\n'
    )
  assert main.main(["watch", str(path)]) == 0
  shown = capsys.readouterr().err
  assert r"\x1b[2J" in _is_clean(shown.replace("\x1b[2J\x1b[H", ""))


def test_escapes_in_a_file_name_are_escaped(tmp_path, capsys):
  path = tmp_path / "\x1b[2Jrun.jsonl"
  for command in ("watch", "report"):
    assert main.main([command, str(path)]) == 2
  run_journals.ended(path)
  assert main.main(["report", str(path)]) == 0
  shown = capsys.readouterr()
  assert r"\x1b[2Jrun.jsonl" in _is_clean(shown.out) + _is_clean(shown.err)
