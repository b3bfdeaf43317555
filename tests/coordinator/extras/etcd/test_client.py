"""The client on real servers, which authenticate, encrypt, and die."""

import etcd_cluster
import pytest

from optax_dist.coordinator.extras.etcd import client, keys

pytestmark = [etcd_cluster.needs_etcd, pytest.mark.nightly]
_KEY = {"key": keys.encoded("key")}


def _put(url, seconds=60.0):
  with client.Client(keys.parse(url)) as asked:
    return asked.ask("kv/put", _KEY | {"value": ""}, seconds)


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
    where = cluster.url.partition("//")[2]
    assert "header" in _put(f"etcd://root:pass%20word@{where}")
    for bad in (f"etcd://root:wrong@{where}", f"etcd://{where}"):
      with pytest.raises((client.Rejected, client.NoAnswer)) as error:
        _put(bad, 1.0)
      assert "wrong" not in str(error.value)
  finally:
    cluster.close()
