"""`--web` of `watch`."""

import pathlib
import re
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
import run_journals

from optax_dist.cli import main
from optax_dist.coordinator import journal


def _read(url):
  with urllib.request.urlopen(url, timeout=60) as answer:
    return answer.read().decode()


def test_watch_serves_metrics_during_a_run(tmp_path):
  path = tmp_path / "run.jsonl"
  with journal.Journal(path) as written:
    run_journals.begin(written)
    run_journals.commit(written, 0, 0, 1, 2, at=1.0)
    watch = subprocess.Popen(
      [
        *(sys.executable, "-m", "optax_dist", "watch", str(path)),
        *("--web", "0"),
      ],
      stdout=subprocess.PIPE,
      text=True,
      cwd=pathlib.Path(__file__).parents[3],
    )
    try:
      said = watch.stdout.readline()
      url = re.search(r"and (http://127\.0\.0\.1:\d+/metrics)", said)[1]
      assert "optax_dist_steps_total 1.0" in _read(url)
      run_journals.commit(written, 1, 0, 1, 2, at=3.0)
      text = _read(url)
      assert "optax_dist_steps_total 2.0" in text
      assert "optax_dist_step_seconds_sum 2.0" in text
      watch.send_signal(signal.SIGINT)
      assert watch.wait(300) == 0
    finally:
      watch.kill()
      watch.communicate()
  with pytest.raises(OSError, match="refused"):
    _read(url)


def test_taken_port_is_reported_in_one_line(tmp_path, capsys):
  path = run_journals.ended(tmp_path / "run.jsonl")
  with socket.socket() as taken:
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    port = str(taken.getsockname()[1])
    assert main.main(["watch", str(path), "--web", port]) == 2
  assert "can't listen at 127.0.0.1 port" in capsys.readouterr().err
