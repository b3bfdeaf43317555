"""The output directory."""

import pytest

from optax_dist.cli import errors, output


def test_makes_the_directory_and_nothing_in_it(tmp_path):
  directory = tmp_path / "deep" / "er"
  assert output.prepare(directory, ["a", "b"]) == [
    directory / "a",
    directory / "b",
  ]
  assert list(directory.iterdir()) == []


def test_leaves_what_is_there_alone(tmp_path):
  (tmp_path / "a").write_text("kept")
  output.prepare(tmp_path, ["a", "b"])
  assert (tmp_path / "a").read_text() == "kept"
  assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
  ("where", "said"),
  [
    ("file", "it is a file"),
    ("file/below", "Not a directory"),
    ("taken", "Is a directory"),
    ("/proc/here", "can't be written"),
  ],
)
def test_what_can_not_be_written_is_refused(tmp_path, where, said):
  (tmp_path / "file").write_text("")
  (tmp_path / "taken" / "metrics.jsonl").mkdir(parents=True)
  with pytest.raises(errors.CommandError, match=said) as info:
    output.prepare(tmp_path / where, ["metrics.jsonl"])
  assert info.value.exit_code == 2
  assert f"--output {tmp_path / where}" in str(info.value)
