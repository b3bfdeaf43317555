"""The store on a real etcd cluster whose servers die, stop and are wiped."""

import base64
import contextlib
import re
import shutil
import subprocess
import threading
import time

import etcd_cluster
import owners
import proxies
import pytest

from optax_dist.coordinator.extras.etcd import client as etcd
from optax_dist.coordinator.store import interface, urls
from optax_dist.coordinator.transport import addresses

SECRET = b"0123456789abcdef"

# Three servers in each test; test_interface.py has all that a store promises.
pytestmark = [etcd_cluster.needs_etcd, pytest.mark.nightly]


@pytest.fixture
def cluster(tmp_path):
  made = etcd_cluster.Cluster(tmp_path)
  yield made
  made.close()


@pytest.fixture
def connect(cluster):
  """A function that connects a client, through a proxy if one is given."""
  with contextlib.ExitStack() as stack:

    def make(secret=SECRET, url=cluster.url):
      place = urls.parse(url)
      owner = owners.Owner(lambda wake: etcd.EtcdStore(place, secret, wake))
      stack.callback(owner.store.close)
      return owner

    yield make


@pytest.fixture
def behind_leader(cluster, connect, monkeypatch):
  """The leader's number, the way to it, and a client that asks it first."""
  leader = cluster.leader()
  others = [e for i, e in enumerate(cluster.endpoints) if i != leader]
  with proxies.threaded(cluster.endpoints[leader]) as way:
    with monkeypatch.context() as patch:
      # However long the leader takes for this and the next answer, no other
      # server is asked.
      patch.setattr(etcd, "_ATTEMPT", (100.0, 100.0))
      patch.setattr(etcd.random, "shuffle", lambda servers: None)
      one = connect(url=f"etcd://{','.join([way.address, *others])}")
      assert isinstance(one.ask("put", "ready", b""), interface.Done)
    assert way.made == 1
    yield leader, way, one


@pytest.mark.parametrize(
  "phase", ["before", "received", "applied", "answered", "electing"]
)
def test_the_leader_dies_in_each_phase_of_a_put(
  cluster, connect, behind_leader, phase
):
  leader, way, one = behind_leader
  two = connect()
  assert two.get("log/0") is None
  value = b"mine"
  if phase == "before":
    cluster.kill(leader)
    number = one.begin("put_if_absent", "log/0", value)
  elif phase == "received":
    cluster.pause(leader)
    number = one.begin("put_if_absent", "log/0", value)
    time.sleep(0.3)
    cluster.kill(leader)
  elif phase == "applied":
    # Its answer is lost, and it has happened.
    way.back.swallows = True
    number = one.begin("put_if_absent", "log/0", value)
    two.wait_for_value("log/0", value)
    cluster.kill(leader)
  elif phase == "answered":
    number = one.begin("put_if_absent", "log/0", value)
    one.answer(number)
    cluster.kill(leader)
  else:
    cluster.kill(leader)
    time.sleep(0.2)
    number = one.begin("put_if_absent", "log/0", value)
  assert one.answer(number) == interface.Done(number)
  number = two.begin("put_if_absent", "log/0", b"another")
  assert two.answer(number) == interface.Conflict(number, value)
  assert two.get("log/0") == value


def test_each_put_during_an_election_is_done_once(cluster, connect):
  clients = [connect() for _ in range(3)]
  watcher = connect()
  answers = {}

  def put(index):
    for key in range(60):
      value = b"%d by %d" % (key, index)
      answers[index, key] = clients[index].ask(
        "put_if_absent", f"log/{key}", value, timeout=100.0
      )

  threads = [threading.Thread(target=put, args=(i,)) for i in range(3)]
  for thread in threads:
    thread.start()
  time.sleep(0.05)
  killed = cluster.leader()
  cluster.kill(killed)
  time.sleep(1.0)
  cluster.start(killed)
  cluster.wait(killed)
  cluster.kill(cluster.leader())
  for thread in threads:
    thread.join(240.0)
  assert not any(thread.is_alive() for thread in threads)
  for key in range(60):
    done = [i for i in range(3) if isinstance(answers[i, key], interface.Done)]
    assert len(done) == 1, (key, [answers[i, key] for i in range(3)])
    assert watcher.get(f"log/{key}") == b"%d by %d" % (key, done[0])


def test_without_a_quorum_the_fate_of_a_put_is_found_out_later(
  cluster, connect
):
  one = connect()
  assert isinstance(one.ask("put", "log/0", b"0"), interface.Done)
  leader = cluster.leader()
  other = (leader + 1) % 3
  for index in (leader, other):
    cluster.kill(index)
  began = time.monotonic()
  answer = one.ask("put_if_absent", "log/1", b"1", timeout=1.5)
  assert time.monotonic() - began > 1.4
  assert isinstance(answer, interface.Unknown)
  for part in ("put of 'log/1'", one.store.address):
    assert part in answer.reason
  assert float(re.search(r"no answer in (.*) s", answer.reason)[1]) >= 1.5
  for index in (leader, other):
    cluster.start(index)
  answer = one.ask("put_if_absent", "log/1", b"1")
  assert isinstance(answer, interface.Done)
  assert [one.get("log/0"), one.get("log/1")] == [b"0", b"1"]


def test_a_stopped_server_is_left_for_another(behind_leader):
  _, way, one = behind_leader
  assert one.get("ready") == b""
  way.back.swallows = True  # The connection stays, and nothing comes.
  number = one.begin("put_if_absent", "log/0", b"x")
  assert one.answer(number) == interface.Done(number)


def test_a_slow_network_is_no_loss(behind_leader, monkeypatch):
  _, way, one = behind_leader
  way.there.delay = way.back.delay = 0.15
  assert 2 * way.back.delay < etcd._ATTEMPT[0]
  # On a busy machine an answer may take longer than the network does.
  monkeypatch.setattr(etcd, "_ATTEMPT", (100.0, 100.0))
  for key in range(3):
    answer = one.ask("put_if_absent", f"log/{key}", b"x")
    assert isinstance(answer, interface.Done)
  assert way.made == 1


def test_a_forged_value_ends_the_run(cluster, connect):
  one, two = connect(), connect()
  assert isinstance(one.ask("put", "log/0", b"x"), interface.Done)
  key = base64.b64encode(b"optax-dist/log/0").decode()
  value = base64.b64encode(b"forged").decode()
  cluster.post(0, "kv/put", {"key": key, "value": value})
  one.begin("get", "log/0")
  two.begin("put_if_absent", "log/0", b"x")
  for each in (one, two):
    lost = each.wait_for(
      lambda events: [e for e in events if isinstance(e, interface.StoreLost)]
    )
    assert "'optax-dist/log/0' has a value that no member" in lost[0].reason
    assert cluster.endpoints[0] in lost[0].reason
  one.begin("get", "log/0")
  assert one.wait_long(0.2) == []


def test_a_value_is_good_for_its_key_secret_and_prefix_only(cluster, connect):
  one = connect()
  assert isinstance(one.ask("put", "log/0", b"x"), interface.Done)
  folder = b"optax-dist/log/"
  read = {"key": base64.b64encode(folder + b"0").decode()}
  sealed = cluster.post(0, "kv/range", read)["kvs"][0]["value"]
  copy = {"key": base64.b64encode(folder + b"1").decode(), "value": sealed}
  cluster.post(0, "kv/put", copy)
  one.begin("get", "log/1")
  stranger = connect(secret=b"another secret!!")
  stranger.begin("get", "log/0")
  for each in (one, stranger):
    each.wait_for(
      lambda events: (
        isinstance(events[-1], interface.StoreLost) if events else False
      )
    )
  assert connect(url=f"{cluster.url}?prefix=team").get("log/0") is None


def test_a_cluster_that_was_wiped_is_lost(cluster, connect):
  one = connect()
  for key in range(5):
    one.ask("put", f"log/{key}", b"x")
  for index in range(3):
    cluster.kill(index)
    cluster.forget(index)
  for index in range(3):
    cluster.start(index)
  for index in range(3):
    cluster.wait(index)
  one.begin("get", "log/0")
  lost = one.wait_for(
    lambda events: [e for e in events if isinstance(e, interface.StoreLost)]
  )
  assert "the cluster was re-created" in lost[0].reason


def test_a_user_logs_in(tmp_path):
  cluster = etcd_cluster.Cluster(tmp_path, 1)
  try:
    for path, body in (
      ("user/add", {"name": "root", "password": "pass word"}),
      ("role/add", {"name": "root"}),
      ("user/grant", {"user": "root", "role": "root"}),
      ("enable", {}),
    ):
      cluster.post(0, f"auth/{path}", body)
    answers = []
    for login in ("root:pass%20word@", "root:wrong@", ""):
      place = urls.parse(cluster.url.replace("//", "//" + login))
      one = owners.Owner(
        lambda wake, place=place: etcd.EtcdStore(place, SECRET, wake)
      )
      answers.append(one.ask("put", "log/0", b"x"))
      assert "pass" not in one.store.address
      one.store.close()
    assert isinstance(answers[0], interface.Done)
    for answer in answers[1:]:
      assert isinstance(answer, interface.Unknown)
  finally:
    cluster.close()


def test_connections_are_encrypted_where_certificates_are_given(tmp_path):
  if shutil.which("openssl") is None:
    pytest.skip("openssl makes the certificate, and is not here")
  cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
  subprocess.run(
    [
      *("openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-days", "2"),
      *("-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", "/CN=localhost"),
      *("-addext", "subjectAltName=DNS:localhost"),
      *("-keyout", key, "-out", cert),
    ],
    check=True,
    capture_output=True,
    timeout=60,
  )
  (port,) = addresses.free_ports()
  url = f"https://localhost:{port}"
  with (tmp_path / "log").open("wb") as log:
    server = subprocess.Popen(
      [
        *("etcd", "--data-dir", str(tmp_path / "data")),
        *("--cert-file", cert, "--key-file", key),
        *("--trusted-ca-file", cert, "--client-cert-auth"),
        *("--listen-client-urls", url, "--advertise-client-urls", url),
        *("--listen-peer-urls", "http://localhost:0"),
      ],
      stdout=log,
      stderr=log,
    )
  answers = []
  try:
    for query in (f"ca={cert}&cert={cert}&key={key}", f"ca={cert}"):
      place = urls.parse(f"etcds://localhost:{port}?{query}")
      one = owners.Owner(
        lambda wake, place=place: etcd.EtcdStore(place, SECRET, wake)
      )
      timeout = 2.0 if answers else 200.0
      answers.append(one.ask("put", "log/0", b"x", timeout=timeout))
      one.store.close()
  finally:
    server.kill()
    server.wait(60.0)
  assert isinstance(answers[0], interface.Done), answers[0]
  assert isinstance(answers[1], interface.Unknown)
