"""`--web` and `--tensorboard` of `launch`."""

import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import urllib.request

import event_files
import pytest

from optax_dist.cli import main

# A replica that needs nothing but Python: it writes its run's journal itself.
_SCRIPT = """
import json, os, pathlib, time
with open(os.environ["OPTAX_DIST_JOURNAL"], "a") as file:
  for line in json.loads(os.environ["LINES"]):
    file.write(json.dumps(line) + "\\n")
print("written", flush=True)
while not pathlib.Path(os.environ["SIGN"]).exists():
  time.sleep(0.01)
"""
_LINES = [
  {
    "kind": "run",
    "time": 0.0,
    "version": 1,
    "strategy": "sync_replicas",
    "step": 0,
  },
  {"kind": "join", "time": 0.0, "replica": 0, "incarnation": 0, "step": 0},
  {"kind": "commit", "time": 1.0, "step": 0, "attempt": 0, "members": []},
  {"kind": "commit", "time": 3.0, "step": 1, "attempt": 0, "members": []},
]


def _read(url):
  with urllib.request.urlopen(url, timeout=60) as answer:
    return answer.read().decode()


@pytest.mark.parametrize("keeps", [False, True], ids=["no output", "output"])
def test_a_launched_job_is_reported(tmp_path, keeps):
  script, sign = tmp_path / "script.py", tmp_path / "sign"
  script.write_text(_SCRIPT)
  flags = ["--web", "0", "--tensorboard", str(tmp_path / "events")]
  flags += ["--output", str(tmp_path / "out")] if keeps else []
  command = [sys.executable, "-m", "optax_dist", "launch", "--replicas", "1"]
  job = subprocess.Popen(
    [*command, "--store", "tcp://127.0.0.1:1", *flags, str(script)],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    cwd=pathlib.Path(__file__).parents[3],
    env=_environment(LINES=json.dumps(_LINES), SIGN=str(sign)),
  )
  try:
    said = job.stderr.readline()
    url = re.search(r"and (http://127\.0\.0\.1:\d+/metrics)", said)[1]
    assert job.stdout.readline() == "[replica 0] written\n"
    text = _read(url)
    assert "optax_dist_steps_total 2.0" in text
    assert "optax_dist_step_seconds_sum 2.0" in text
    sign.touch()
    assert job.wait(300) == 0
  finally:
    job.kill()
    job.communicate()
  with pytest.raises(OSError, match="refused"):
    _read(url)
  points = event_files.read(tmp_path / "events")
  assert points["optax_dist/steps"][-1] == (2, 2.0)


def _environment(**more):
  kept = {k: v for k, v in os.environ.items() if "OPTAX_DIST" not in k}
  return kept | more


def test_what_is_missing_is_one_line(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "script.py").write_text("raise SystemExit(3)")
  flags = ["--tensorboard", "events"]
  with monkeypatch.context() as patched:
    patched.setitem(sys.modules, "tensorboardX", None)
    assert main.main(["launch", *flags, "script.py"]) == 2
  said = capsys.readouterr().err.strip()
  assert said.splitlines()[-1] == (
    "optax-dist: tensorboardX is not installed; run: pip install"
    " 'optax-dist[metrics]'"
  )
  with socket.socket() as taken:
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    flags = ["--web", str(taken.getsockname()[1])]
    assert main.main(["launch", *flags, "script.py"]) == 2
  assert "can't listen at 127.0.0.1 port" in capsys.readouterr().err
  (tmp_path / "file").touch()
  assert main.main(["launch", "--tensorboard", "file/dir", "script.py"]) == 2
  assert "--tensorboard: Not a directory" in capsys.readouterr().err
