"""``optax-dist plan --chips``."""

import json

from optax_dist.cli import main

ARGV = ["plan", "--latency", "shifted-exponential:1,0.05", "--chips", "2048"]


def test_a_strategy_is_recommended(tmp_path, capsys):
  out, picture = tmp_path / "out.json", tmp_path / "out.png"
  argv = [*ARGV, "--chips-per-group", "64", "256", "--periods", "20"]
  argv += ["--repetitions", "2"]
  argv += ["--model-bytes", "1e9", "--network", "0.001,1e10"]
  argv += ["--json", str(out), "--save", str(picture)]
  assert main.main(argv) == 0
  said = capsys.readouterr().out
  assert "recommended: " in said
  assert "runner-up: " in said
  assert "one program" in said
  report = json.loads(out.read_text())
  values = [option["progress"] for option in report["options"]]
  assert values == sorted(values, reverse=True)
  assert report["options"][0] == report["recommended"]
  assert {o["chips_per_group"] for o in report["options"]} == {64, 256}
  assert picture.read_bytes().startswith(b"\x89PNG")


def test_wrong_numbers_are_one_line(capsys):
  assert main.main([*ARGV, "--chips-per-group", "7"]) == 2
  assert "multiple of chips_per_group" in capsys.readouterr().err
  assert main.main([*ARGV, "--network", "1"]) == 2
  assert "LATENCY,BANDWIDTH" in capsys.readouterr().err
