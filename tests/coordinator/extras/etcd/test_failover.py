"""Coordinators in etcd: one has the lease, and another one takes over."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time

import commands
import etcd_cluster
import jax.numpy as jnp
import optax
import pytest
import waiting

from optax_dist import coordinator
from optax_dist.coordinator.extras.etcd import finder, keys
from optax_dist.coordinator.launch import child
from optax_dist.coordinator.server import process

SECRET = "a secret of enough bytes"
PARAMS = {"w": jnp.ones(100)}
_LEASE = 2.0

pytestmark = etcd_cluster.needs_etcd
_numbers = itertools.count()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
  made = etcd_cluster.Cluster(tmp_path_factory.mktemp("etcd"), 1)
  yield made
  made.close()


@pytest.fixture
def url(cluster):
  return f"{cluster.url}?lease={_LEASE:g}&prefix=test/{next(_numbers)}"


@pytest.fixture
def start(url):
  """A function that starts a coordinator."""
  started = []

  def make():
    started.append(process.start(SECRET.encode(), store=url))
    return started[-1]

  yield make
  for one in started:
    one.process.send_signal(signal.SIGCONT)
    one.stop()


def _find(url):
  """Where members find the coordinator."""
  with contextlib.closing(
    finder.Finder(keys.parse(url), SECRET.encode())
  ) as asks:
    return asks.find()


def _address(url):
  """The same; "" if there is none."""
  try:
    return _find(url)
  except ValueError:
    return ""


def _wait_for_another(url, address):
  """Waits until members find the coordinator elsewhere."""
  waiting.until(lambda: _address(url) not in ("", address))


def _join(url, number=0, secret=SECRET):
  return coordinator.join(
    optax.sgd(0.1),
    PARAMS,
    replica=number,
    total_num_replicas=2,
    coordinator_address=url,
    secret=secret,
    timeout=120.0,
  )


class _Replicas:
  """Two replicas, in threads, that train until `end`."""

  def __init__(self, url):
    self.steps, self.found, self.errors = [0, 0], {}, []
    self._last = None
    self._threads = [
      threading.Thread(target=self._run, args=(i, url)) for i in (0, 1)
    ]
    for thread in self._threads:
      thread.start()

  def _run(self, number, url):
    try:
      with _join(url, number) as replica:
        while self._last is None or replica.global_step < self._last:
          replica.step(PARAMS)
          self.steps[number] = replica.global_step
          time.sleep(0.01)
        self.found[number] = replica.global_step, float(replica.params["w"][0])
    except BaseException as error:
      self.errors.append(error)

  def wait(self, steps):
    """Waits until both have come to a step."""
    waiting.until(
      lambda: self.errors or min(self.steps) >= steps, lambda: self.steps
    )
    assert not self.errors

  def end(self):
    """Ends them; checks that no step is lost or was taken twice."""
    self._last = max(self.steps) + 5
    for thread in self._threads:
      thread.join(200.0)
    assert not self.errors
    assert self.found[0] == self.found[1]
    step, value = self.found[0]
    expected = jnp.float32(1.0)
    for _ in range(step):
      expected = expected - jnp.float32(0.1)
    assert step == self._last
    assert value == pytest.approx(float(expected), rel=1e-5)


def test_a_standby_takes_over_from_a_coordinator_that_is_killed(start, url):
  first, second = start(), start()
  assert first.address.partition("?")[0] == url.partition("?")[0]
  replicas = _Replicas(url)
  replicas.wait(5)
  for _ in range(2):
    address = _address(url)
    assert address
    first.kill()
    _wait_for_another(url, address)
    replicas.wait(max(replicas.steps) + 5)
    first, second = second, start()
  replicas.end()


def test_standby_does_not_wait_for_a_coordinator_that_died_on_its_host(url):
  """Its port says so, long before etcd does."""
  slow = url.replace("lease=2", "lease=900")
  start = lambda: process.start(SECRET.encode(), store=slow, bind="127.0.0.1")
  with start() as first:
    address = waiting.until(lambda: _address(slow))
    with start():
      first.kill()
      _wait_for_another(slow, address)


def test_a_coordinator_that_etcd_refuses_at_last_ends(url):
  """As when its space is exceeded while the log is read."""
  code = f"""
from optax_dist.coordinator.extras.etcd import client, lease
from optax_dist.coordinator.server import __main__, process
def announce(self, address):
  ask = self.client.ask
  def refuse(path, body, seconds):
    if path == "kv/txn":
      raise client.Rejected("database space exceeded")
    return ask(path, body, seconds)
  self.client.ask = refuse
  announced(self, address)
announced, lease.Lease.announce = lease.Lease.announce, announce
raise SystemExit(__main__.run(process.Settings(), b"", {url!r}))
"""
  ended = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, timeout=200
  )
  assert ended.returncode == 1
  assert ended.stderr.splitlines() == [
    "The coordinator ends: etcd refuses a request: database space exceeded"
  ]


def test_replaced_coordinator_ends_when_it_continues(start, url):
  """As for a host that is cut off: only the lease says that it is gone."""
  first, _ = start(), start()
  replicas = _Replicas(url)
  replicas.wait(5)
  address = _address(url)
  first.process.send_signal(signal.SIGSTOP)
  _wait_for_another(url, address)
  replicas.wait(max(replicas.steps) + 5)
  first.process.send_signal(signal.SIGCONT)
  assert first.process.wait(60.0) == 1
  replicas.wait(max(replicas.steps) + 5)
  replicas.end()


def test_coordinator_that_waits_for_etcd_tells_its_launcher_that_it_lives(
  cluster, url
):
  """Otherwise it is replaced, long before its lease has ended."""
  slow, beats = url.replace("lease=2", "lease=900"), []
  command = process.command(process.Settings())
  variables = process.variables(SECRET.encode(), slow)
  made = child.Child("coordinator", command, env=variables)
  try:
    replicas = _Replicas(slow)
    replicas.wait(5)
    cluster.pause(0)
    try:
      made.read()
      waiting.until(lambda: beats.extend(made.read()) or len(beats) > 3)
    finally:
      cluster.resume(0)
    replicas.wait(max(replicas.steps) + 5)
    replicas.end()
  finally:
    made.kill()


def test_coordinator_that_ends_returns_its_lease(start, url):
  first = start()
  waiting.until(lambda: _address(url))
  address = _address(url)
  second = start()
  first.stop()
  assert first.process.returncode == 0
  _wait_for_another(url, address)
  second.stop()
  waiting.until(lambda: not _address(url))


def test_job_with_another_secret_is_refused_by_name(start, url):
  start()
  waiting.until(lambda: _address(url))
  other = "another secret, long"
  assert "no process of this job wrote" in commands.refused_by_etcd(url, other)
  with pytest.raises(
    coordinator.JoinRefused, match="no process of this job wrote"
  ):
    _join(url, secret=other)


def test_a_key_without_a_value_is_named(cluster, url):
  key = keys.parse(url).holder_key
  cluster.post(0, "kv/put", {"key": keys.encoded(key)})
  assert (
    f"etcd's key {key!r} has a value that no process"
    in commands.refused_by_etcd(url, SECRET)
  )
  # Waiting does not help: its writer does not know the secret.
  with pytest.raises(
    coordinator.JoinRefused, match="no process of this job wrote"
  ):
    _join(url)


def test_a_login_that_etcd_refuses_ends_at_once(cluster, url):
  wrong = url.replace("://", "://nobody:pass%20word@")
  with pytest.raises(coordinator.JoinRefused, match="authentication") as error:
    _join(wrong)
  assert "word" not in str(error.value)


@pytest.mark.nightly
def test_a_run_survives_the_loss_of_one_of_three_servers(tmp_path):
  cluster = etcd_cluster.Cluster(tmp_path)
  where = f"{cluster.url}?lease={_LEASE:g}"
  try:
    with process.start(SECRET.encode(), store=where) as first:
      waiting.until(lambda: _address(where))
      with process.start(SECRET.encode(), store=where):
        replicas = _Replicas(where)
        replicas.wait(5)
        cluster.kill(cluster.leader())
        replicas.wait(max(replicas.steps) + 5)
        address = _address(where)
        first.kill()
        _wait_for_another(where, address)
        replicas.wait(max(replicas.steps) + 5)
        replicas.end()
  finally:
    cluster.close()


_PROGRAM = """
import jax.numpy as jnp, optax
from optax_dist import coordinator
with coordinator.join(optax.sgd(0.1), jnp.ones(100), timeout=60.0) as replica:
  while replica.global_step < 20:
    replica.step(jnp.ones(100))
  print("at step", replica.global_step, flush=True)
"""


def test_each_launcher_starts_a_coordinator_that_may_take_over(url, tmp_path):
  program = tmp_path / "program.py"
  program.write_text(_PROGRAM)
  variables = {process.STORE_VARIABLE: url, process.SECRET_VARIABLE: SECRET}
  launchers = [
    subprocess.Popen(
      [
        *(sys.executable, "-m", "optax_dist", "launch", "--run", "mine"),
        *("--replicas", "2", "--nodes", "2", "--node-rank", str(rank)),
        str(program),
      ],
      env=os.environ | variables,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    for rank in (0, 1)
  ]
  said = [launcher.communicate(timeout=200.0)[0] for launcher in launchers]
  assert [launcher.returncode for launcher in launchers] == [0, 0], said
  for rank in (0, 1):
    assert f"[replica {rank}] at step 20" in said[rank]
