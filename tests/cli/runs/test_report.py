"""The ``report`` command."""

import csv
import json
import pathlib

import matplotlib.image
import pytest

from optax_dist import simulate
from optax_dist.cli import main
from optax_dist.coordinator import journal


@pytest.fixture(name="runs")
def _runs(tmp_path):
  paths = []
  for k in (4, 3):
    paths.append(str(tmp_path / f"{k}.jsonl"))
    with journal.Journal(paths[-1]) as file:
      simulate.simulate_timing(
        simulate.sync_replicas(k),
        simulate.parse_latency("exponential:1"),
        4,
        steps=100,
        journal=file,
      )
  return paths


def test_a_run_is_reported(runs, tmp_path, capsys):
  out = {name: str(tmp_path / f"out.{name}") for name in ("json", "csv", "png")}
  argv = ["report", runs[0], "--json", out["json"], "--csv", out["csv"]]
  assert main.main([*argv, "--save", out["png"]]) == 0
  said = capsys.readouterr().out
  for word in ("useful", "waiting", "recovery", "goodput", "4 replicas for"):
    assert word in said
  (report,) = json.loads((tmp_path / "out.json").read_text()).values()
  shares = report["goodput"]["shares"]
  assert sum(shares.values()) == pytest.approx(1.0)
  assert set(report["replicas"]) == set("0123")
  rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
  useful = sum(
    float(row["end"]) - float(row["begin"])
    for row in rows
    if row["category"] == "useful"
  )
  assert useful == pytest.approx(report["goodput"]["seconds"]["useful"])
  assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_two_runs_are_compared(runs, tmp_path, capsys):
  picture = tmp_path / "out.png"
  argv = ["report", runs[0], "--compare", runs[1], "--save", str(picture)]
  assert main.main(argv) == 0
  said = capsys.readouterr().out
  # Three of four wait less, and drop what is late.
  (dropped,) = [line for line in said.splitlines() if "dropped" in line][:1]
  assert "0.0%" in dropped
  assert "points" in dropped
  assert "+" in dropped
  assert picture.exists()


def test_journals_of_one_name_are_told_apart(runs, tmp_path, capsys):
  picture = tmp_path / "out.png"
  paths = []
  for run, name in zip(runs, "ab", strict=True):
    paths.append(tmp_path / name / "journal.jsonl")
    paths[-1].parent.mkdir()
    pathlib.Path(run).rename(paths[-1])
  argv = ["report", paths[0], "--compare", paths[1], "--save", picture]
  assert main.main([str(word) for word in argv]) == 0
  said = capsys.readouterr().out
  assert "a/journal.jsonl: goodput" in said
  assert "b/journal.jsonl: goodput" in said
  height, width, _ = matplotlib.image.imread(picture).shape
  assert width > 2 * height  # A panel for each run.


def test_what_is_no_run_is_refused(tmp_path, capsys):
  path = tmp_path / "run.jsonl"
  assert main.main(["report", str(path)]) == 2
  assert "can't be read" in capsys.readouterr().err
  with journal.Journal(path) as file:
    file.write("run", strategy="sync_replicas", step=0)
  assert main.main(["report", str(path)]) == 2
  assert "nothing to report" in capsys.readouterr().err
