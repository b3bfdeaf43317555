"""A run's page: its data, access to it, and it in a real browser."""

import html
import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request

import embedded_runs as runs
import pytest
import waiting

from optax_dist.cli import errors
from optax_dist.cli.runs import view
from optax_dist.cli.runs.web import server
from optax_dist.coordinator import journal
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
    # No replica is lost because it is slow.
    options = {"journal": path, "silence_timeout": 30.0}
    replicas = [runs.make(world, i, k=2, n=3, **options) for i in range(3)]
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
  made = server.Server(view.View(job))
  yield made
  made.close()


@pytest.fixture
def empty(tmp_path):
  """The page of a run that has not begun."""
  made = server.Server(view.View(tmp_path / "run.jsonl"))
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


def test_state_json_matches_the_journal(page, job):
  status, headers, body = get(page.url + "state.json")
  assert status == 200
  assert headers["Content-Type"].startswith("application/json")
  state = json.loads(body)
  assert state["step"] >= 30
  members = {member["replica"]: member for member in state["members"]}
  assert set(members) == {"0", "1", "2"}
  assert members["2"]["losses"] == 1
  commits = [r for r in journal.read(job).records if r["kind"] == "commit"]
  for name, member in members.items():
    accepted = sum(
      m["count"]
      for commit in commits
      for m in commit["members"]
      if str(m["replica"]) == name
    )
    assert member["accepted"] == accepted
  assert any(event["kind"] == "lost" for event in state["events"])
  assert {span["category"] for span in state["spans"]} >= {"useful"}
  assert len(state["steps"]) == len(commits) - 1
  assert sum(state["goodput"].values()) == pytest.approx(1.0)
  assert 0 < state["goodput"]["useful"] < 1


def test_server_has_one_read_only_page(page):
  assert get(page.url)[0] == 200
  assert get(page.url + "etc/passwd")[0] == 404
  for method in ("POST", "PUT", "DELETE"):
    assert get(page.url, method=method)[0] == 501
  status, headers, body = get(page.url, method="HEAD")
  assert (status, body) == (200, b"")
  assert "default-src 'none'" in headers["Content-Security-Policy"]
  text = get(page.url)[2].decode()
  # The only URL is the namespace of SVG: the page loads nothing from other hosts.
  assert set(re.findall(r"https?://[^\"']+", text)) == {
    "http://www.w3.org/2000/svg"
  }


def test_metrics_are_served_for_prometheus(page):
  assert page.metrics_url == f"{page.url}metrics"
  status, headers, body = get(page.metrics_url)
  assert status == 200
  assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
  lines = body.decode().splitlines()
  assert f"optax_dist_step {page.state()['step']:.1f}" in lines


def test_host_header_of_another_site_is_refused(page):
  """A page of another site, whose name leads here, can't read it."""
  assert get(page.url + "state.json", host="evil.example:80")[0] == 403
  assert get(page.url + "metrics", host="evil.example:80")[0] == 403
  assert get(page.url + "state.json", host="localhost:80")[0] == 200


@pytest.mark.parametrize("host", ["[", "[::1", "local]host", "a@[b"])
def test_an_invalid_host_name_is_refused(empty, capfd, host):
  assert get(empty.url, host=host)[0] == 403
  assert capfd.readouterr().err == ""


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_no_token_is_needed_on_loopback(empty, host):
  assert empty.token == ""
  port = empty.url.rsplit(":", 1)[1].strip("/")
  assert get(empty.url, host=f"{host}:{port}")[0] == 200
  assert get(empty.url, host=host)[0] == 200


@pytest.mark.parametrize("host", ["", "127.0.0.1.example", "10.0.0.1"])
def test_host_header_outside_of_loopback_is_refused(empty, host):
  assert get(empty.url, host=host)[0] == 403


def test_each_page_beyond_loopback_has_its_own_token(tmp_path, monkeypatch):
  # As where it is bound elsewhere, which a test should not be.
  monkeypatch.setattr(server.addresses, "is_loopback", lambda host: False)
  pages = []
  try:
    for _ in range(2):
      pages.append(server.Server(view.View(tmp_path / "run.jsonl")))
    tokens = {page.token for page in pages}
    assert len(tokens) == 2
    assert min(map(len, tokens)) >= 20
    for page in pages:
      bare, _, token = page.url.partition("?token=")
      assert token == page.token
      assert get(bare)[0] == get(bare + "state.json")[0] == 403
      assert get(page.metrics_url)[0] == 200  # By scrapers, which have none.
      assert get(page.url)[0] == 200
      assert get(f"{bare}state.json?token={token}")[0] == 200
      assert get(page.url + "0")[0] == get(page.url[:-1])[0] == 403
      # The host name may be any: a client with the token may read the page.
      assert get(page.url, host="a.host.example")[0] == 200
  finally:
    for page in pages:
      page.close()


def test_server_listens_on_ipv6(tmp_path):
  try:
    page = server.Server(view.View(tmp_path / "run.jsonl"), bind="::1")
  except errors.CommandError as error:
    pytest.skip(str(error))
  try:
    assert page.url.startswith("http://[::1]:")
    assert get(page.url)[0] == 200
  finally:
    page.close()


@pytest.mark.nightly
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_browser_shows_the_page(page, tmp_path):
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


def _connections(count, address):
  """Clients that never ask for anything."""
  return [socket.create_connection(address, 30.0) for _ in range(count)]


def _threads():
  return sum(
    "process_request" in thread.name for thread in threading.enumerate()
  )


def test_number_of_threads_for_slow_clients_is_limited(page, monkeypatch):
  monkeypatch.setattr(server, "_SLOW", 0.0)
  address = page._listener.server_address
  most = server._CLIENTS
  slow = _connections(3 * most, address)
  try:
    # The last ones are answered all the same: the oldest have to go.
    for _ in range(3):
      assert get(page.url)[0] == 200
      waiting.until(lambda: _threads() <= most + 1)
    gone = slow[0]
    gone.settimeout(30.0)
    assert gone.recv(1) == b""
  finally:
    for client in slow:
      client.close()


def test_client_is_refused_while_all_threads_are_busy(page, monkeypatch):
  monkeypatch.setattr(server, "_SLOW", 1000.0)
  address = page._listener.server_address
  held = _connections(server._CLIENTS, address)
  try:
    waiting.until(lambda: _threads() >= server._CLIENTS)
    [more] = _connections(1, address)
    with more:
      assert more.recv(1) == b""
    assert _threads() <= server._CLIENTS
  finally:
    for client in held:
      client.close()
  waiting.until(lambda: _threads() == 0)
  assert get(page.url)[0] == 200
