"""Tests of a run's page: its data, access to it, and it in a real browser."""

import html
import json
import re
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request

import embedded_runs as runs
import pytest

from optax_dist.cli import errors
from optax_dist.cli.runs.web import server, view
from optax_dist.coordinator import journal, journal_tail
from optax_dist.coordinator.runtime import endpoint

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def job(tmp_path_factory):
  """The journal of a real job, one of whose three replicas was killed."""
  path = tmp_path_factory.mktemp("job") / "journal.jsonl"
  world = endpoint.World()
  together = threading.Barrier(3)
  results = [runs.Result() for _ in range(3)]

  def train(replica, result):
    together.wait(60.0)
    while replica.global_step < 30 or not faults.done:
      grads, batch = runs.compute(replica, result.computed)
      result.computed += 1
      replica.step(grads, batch=batch)
      time.sleep(0.002)

  with runs.Faults({("computing", 2, 4): runs.kill}) as faults:
    replicas = [runs.make(world, i, k=2, n=3, journal=path) for i in range(3)]
    threads = [
      runs.start(one, train, result)
      for one, result in zip(replicas, results, strict=True)
    ]
    runs.finish(threads)
  assert faults.done == [("computing", 2, 4)]
  assert any(record["kind"] == "lost" for record in runs.records(path))
  return path


@pytest.fixture
def page(job):
  made = server.Server(journal_tail.Tail(job))
  yield made
  made.close()


def get(url, host=None, method="GET"):
  """Returns status, headers and body."""
  request = urllib.request.Request(url, method=method)
  if host is not None:
    request.add_header("Host", host)
  try:
    with urllib.request.urlopen(request, timeout=60) as answer:
      return answer.status, answer.headers, answer.read()
  except urllib.error.HTTPError as error:
    with error:
      return error.code, error.headers, error.read()


def test_the_data_are_those_of_the_job(page, job):
  status, headers, body = get(page.url + "state.json")
  assert status == 200
  assert headers["Content-Type"].startswith("application/json")
  state = json.loads(body)
  assert state["step"] >= 30
  members = {member["replica"]: member for member in state["members"]}
  assert set(members) == {"0", "1", "2"}
  assert members["2"]["losses"] == 1
  commits = [r for r in runs.records(job) if r["kind"] == "commit"]
  for name, member in members.items():
    accepted = sum(
      m["count"]
      for commit in commits
      for m in commit["members"]
      if str(m["replica"]) == name
    )
    assert member["accepted"] == accepted
  assert any(event["kind"] == "lost" for event in state["events"])
  assert {bar["kind"] for bar in state["bars"]} >= {"computing"}
  assert len(state["steps"]) == len(commits) - 1
  assert sum(state["goodput"].values()) == pytest.approx(1.0)
  assert 0 < state["goodput"]["useful"] < 1


def test_it_follows_a_journal_that_grows(tmp_path):
  path = tmp_path / "run.jsonl"
  page = server.Server(journal_tail.Tail(path))
  try:
    assert page.state()["step"] == 0
    with journal.Journal(path) as written:
      written.write("run", strategy="sync_replicas", step=0)
      written.write("join", replica=0, incarnation=1, step=0, time=0.1)
      assert [m["replica"] for m in page.state()["members"]] == ["0"]
      written.write("lost", replica=0, incarnation=1, step=0, time=0.2)
    assert page.state()["members"][0]["state"] == "lost"
  finally:
    page.close()


def test_the_timeline_has_the_last_minute_only():
  shown = view.View()
  shown.update(
    {
      "kind": "drop",
      "replica": 0,
      "time": float(at),
      "arrived": float(at),
      "compute": 1.0,
      "count": 1,
      "reason": "stale",
    }
    for at in range(1, 200)
  )
  bars = shown.state()["bars"]
  assert min(bar["end"] for bar in bars) == 199 - view.WINDOW
  assert len(bars) == view.WINDOW + 1


def test_there_is_one_page_and_it_is_read_only(page):
  assert get(page.url)[0] == 200
  assert get(page.url + "etc/passwd")[0] == 404
  for method in ("POST", "PUT", "DELETE"):
    assert get(page.url, method=method)[0] == 501
  status, headers, body = get(page.url, method="HEAD")
  assert (status, body) == (200, b"")
  assert "default-src 'none'" in headers["Content-Security-Policy"]
  text = get(page.url)[2].decode()
  # What begins with http is the name of SVG alone: no other host is asked.
  assert set(re.findall(r"https?://[^\"']+", text)) == {
    "http://www.w3.org/2000/svg"
  }


def test_another_sites_name_is_refused(page):
  """A page of another site, whose name leads here, can't read it."""
  assert get(page.url + "state.json", host="evil.example:80")[0] == 403
  assert get(page.url + "state.json", host="localhost:80")[0] == 200


def test_beyond_loopback_it_needs_its_token(job):
  page = server.Server(journal_tail.Tail(job), bind="127.0.0.1")
  page.token = "a token of its own"  # As where it is bound elsewhere.
  try:
    assert get(page.url)[0] == 403
    assert get(page.url + "?token=guessed")[0] == 403
    assert get(page.url + "?token=a%20token%20of%20its%20own")[0] == 200
  finally:
    page.close()


def test_an_address_of_this_host_gets_a_token():
  assert not server._is_loopback("0.0.0.0")
  assert not server._is_loopback("host.example")
  assert server._is_loopback("127.0.0.1")
  assert server._is_loopback("::1")


def test_a_port_in_use_is_an_error_in_one_line(page, job):
  port = int(page.url.rsplit(":", 1)[1].strip("/"))
  with pytest.raises(errors.CommandError, match=f"127.0.0.1 port {port}"):
    server.Server(journal_tail.Tail(job), port=port)


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_shows_it(page, tmp_path):
  done = subprocess.run(
    [
      CHROMIUM,
      "--headless",
      "--no-sandbox",
      "--disable-gpu",
      "--disable-quic",
      "--no-first-run",
      "--disable-background-networking",
      "--disable-component-update",
      "--disable-sync",
      "--disable-dev-shm-usage",
      f"--user-data-dir={tmp_path}",
      "--virtual-time-budget=2500",
      "--dump-dom",
      page.url,
    ],
    capture_output=True,
    text=True,
    timeout=180,
  )
  shown = html.unescape(done.stdout)
  assert done.returncode == 0, done.stderr
  rows = re.search(r'<tbody id="members">(.*?)</tbody>', shown, re.DOTALL)[1]
  assert len(re.findall("<tr>", rows)) == 3
  assert re.search(r'<b id="step">(\d+)</b>', shown)[1] >= "30"
  assert "replica 2 lost" in shown
  assert shown.count("<rect") > 20
  assert "<polyline" in shown
  assert re.search(r"useful \d+\.\d %", shown)
  assert re.search(r'<span id="gone"></span>', shown)
