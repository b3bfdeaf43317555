"""The log in etcd: what is read is what was written, whatever comes between."""

import contextlib
import itertools
import threading

import etcd_cluster
import proxies
import pytest
import waiting

from optax_dist.coordinator.extras.etcd import client, keys, log
from optax_dist.coordinator.extras.etcd.lease import Lease
from optax_dist.coordinator.protocol.entries import (
  Began,
  Committed,
  Epoch,
  Job,
  Record,
  RoundId,
  Rules,
  Start,
)
from optax_dist.coordinator.protocol.history import History
from optax_dist.coordinator.server.log import Log, LogError

SECRET = b"0123456789abcdef"

pytestmark = etcd_cluster.needs_etcd
_numbers = itertools.count()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
  made = etcd_cluster.Cluster(tmp_path_factory.mktemp("etcd"), 1)
  yield made
  made.close()


@pytest.fixture
def where(cluster):
  return f"{cluster.url}?lease=2&prefix=log/{next(_numbers)}"


class _Writer:
  """A coordinator's log, with its lease and what it says."""

  def __init__(self, where):
    self.lease = Lease(where, SECRET)
    waiting.until(self.lease.acquire)
    self.log = Log(log.EtcdRecords(self.lease, "a run"))
    try:
      self.history = self.log.read()
    except LogError:
      self.close()
      raise

  def write(self, *entries):
    record = Record(entries)
    self.history.apply(record)
    return self.log.append(record, self.history)

  def begin(self):
    self.write(Epoch(self.history.epoch + 1, "nonce"))
    self.write(Began(Start(), Job((), Rules())))
    return self

  def commit(self, mean):
    step = RoundId(0, self.history.step, 1)
    return self.write(Committed(step, (), mean, False, (), ()))

  def close(self):
    self.log.close()
    self.lease.release()


@contextlib.contextmanager
def _writer(where):
  made = _Writer(where)
  try:
    yield made
  finally:
    made.close()


def _pieces(cluster, where):
  """How many keys the log has."""
  folder = keys.parse(where).log_prefix("a run")
  result = cluster.post(
    0,
    "kv/range",
    {
      "key": keys.encoded(folder),
      "range_end": keys.encoded(folder[:-1] + "0"),
      "keys_only": True,
    },
  )
  return [keys.decoded(pair["key"]).decode() for pair in result.get("kvs", ())]


def test_the_next_coordinator_reads_what_was_written(where):
  with _writer(where) as one:
    assert one.history == History()
    one.begin()
    # Of many pieces, and more than are read at once.
    for size in (0, 10, 300_000, 3_000_000):
      assert one.commit(bytes(size)) == ""
  with _writer(where) as two:
    assert two.history == one.history
    assert two.history.step == 4


def test_long_log_is_compacted_to_one_record(cluster, where, monkeypatch):
  monkeypatch.setattr(log, "_MANY", 20)
  with _writer(where) as one:
    one.begin()
    for _ in range(50):
      one.commit(b"mean")
    assert len(_pieces(cluster, where)) < 30
  with _writer(where) as two:
    assert two.history == one.history
    two.commit(b"mean")
  with _writer(where) as three:
    assert three.history.step == 51


def test_record_without_its_last_piece_is_ignored(cluster, where):
  with _writer(where) as one:
    one.begin()
    before = _pieces(cluster, where)
    one.commit(bytes(300_000))
  last = _pieces(cluster, where)[-1]
  cluster.post(0, "kv/deleterange", {"key": keys.encoded(last)})
  assert len(_pieces(cluster, where)) > len(before)
  with _writer(where) as two:
    assert two.history.step == 0
    two.commit(b"another")
  with _writer(where) as three:
    assert three.history.recent[0].mean == b"another"


def test_damaged_key_is_named(cluster, where):
  with _writer(where) as one:
    one.begin()
    one.commit(b"mean")
  _, second, third = _pieces(cluster, where)
  good, other = (
    cluster.post(0, "kv/range", {"key": keys.encoded(key)})["kvs"][0]["value"]
    for key in (third, second)
  )
  # A value is good for its own key only.
  for value in (other, keys.encoded("forged"), "", good):
    put = {"key": keys.encoded(third), "value": value}
    cluster.post(0, "kv/put", put)
    if value != good:
      with pytest.raises(LogError, match=f"{third}' has a value that no"):
        _Writer(where)
  cluster.post(0, "kv/deleterange", {"key": keys.encoded(second)})
  with pytest.raises(LogError, match=f"{second} is missing"):
    _Writer(where)


def test_a_record_whose_answer_is_lost_is_written_once(cluster, where):
  with _writer(where) as one:
    one.begin()
  with proxies.threaded(cluster.endpoints[0]) as way:
    behind = f"etcd://{way.address}?{where.partition('?')[2]}&lease=60"
    with _writer(behind) as two:
      before = _pieces(cluster, where)
      way.back.swallows = True

      def heal():
        waiting.until(lambda: len(_pieces(cluster, where)) > len(before))
        way.back.swallows = False

      thread = threading.Thread(target=heal)
      thread.start()
      assert two.commit(b"mean") == ""
      thread.join(100.0)
      assert len(_pieces(cluster, where)) == len(before) + 1
      assert two.commit(b"next") == ""
  with _writer(where) as three:
    assert [c.mean for c in three.history.recent] == [b"mean", b"next"]


def test_record_that_etcd_refuses_is_written_later(where, monkeypatch):
  with _writer(where) as one:
    one.begin()
    ask = client.Client.ask

    def refuse(self, path, body, until):
      if path == "kv/txn":
        raise client.Rejected("database space exceeded")
      return ask(self, path, body, until)

    with monkeypatch.context() as patch:
      patch.setattr(client.Client, "ask", refuse)
      for _ in range(3):
        said = one.commit(b"mean")
        assert said.endswith(
          " in etcd: etcd refuses a request: database space exceeded"
        )
    monkeypatch.setattr(one.log, "_retry_at", 0.0)
    assert one.commit(b"mean") == ""
    assert one.commit(b"mean") == ""
  with _writer(where) as two:
    assert two.history == one.history
