"""JSON lines."""

import json

import pytest

from optax_dist.cli import errors
from optax_dist.cli.train import metrics


def test_each_record_is_on_disk_at_once_and_old_ones_are_gone(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text("old\n")
  records = [{"step": 1, "loss": 0.1 + 0.2}, {"step": 2, "loss": 1e-30}]
  with metrics.JsonLines(path) as lines:
    for number, record in enumerate(records, start=1):
      lines.write(record)
      written = [json.loads(line) for line in path.read_text().splitlines()]
      assert written == records[:number]


def test_what_json_can_not_say_is_refused(tmp_path):
  with (
    metrics.JsonLines(tmp_path / "metrics.jsonl") as lines,
    pytest.raises(ValueError, match="JSON compliant"),
  ):
    lines.write({"loss": float("nan")})


def test_a_full_disk_is_a_command_error(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.symlink_to("/dev/full")
  lines = metrics.JsonLines(path)
  with pytest.raises(errors.CommandError, match="No space left"):
    lines.write({"step": 1})
  lines.close()


def test_a_directory_is_a_command_error(tmp_path):
  with pytest.raises(errors.CommandError, match="Is a directory"):
    metrics.JsonLines(tmp_path)
