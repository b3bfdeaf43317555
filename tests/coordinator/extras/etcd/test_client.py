"""The client on real servers: they ask who it is, encrypt, and die."""

import shutil
import subprocess
import time

import etcd_cluster
import pytest

from optax_dist.coordinator.extras.etcd import client, place
from optax_dist.coordinator.transport import addresses

pytestmark = [etcd_cluster.needs_etcd, pytest.mark.nightly]
_KEY = {"key": place.encoded("key")}


def _put(url, seconds=60.0):
  with client.Client(place.parse(url).servers) as asked:
    return asked.ask("kv/put", _KEY | {"value": ""}, time.monotonic() + seconds)


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
    file = tmp_path / "password"
    file.write_text("pass word\n")
    where = cluster.url.partition("//")[2]
    for good in (
      f"etcd://root:pass%20word@{where}",
      f"etcd://root@{where}?password_file={file}",
    ):
      assert "header" in _put(good)
    for bad in (f"etcd://root:wrong@{where}", f"etcd://{where}"):
      with pytest.raises((client.Rejected, client.NoAnswer)) as error:
        _put(bad, 1.0)
      assert "wrong" not in str(error.value)
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
  try:
    there = f"etcds://localhost:{port}?ca={cert}"
    assert "header" in _put(f"{there}&cert={cert}&key={key}", 200.0)
    for bad in (there, f"etcds://localhost:{port}"):
      with pytest.raises(client.NoAnswer):
        _put(bad, 1.0)
  finally:
    server.kill()
    server.wait(60.0)


def test_another_server_is_asked_when_one_dies_or_hangs(tmp_path):
  cluster = etcd_cluster.Cluster(tmp_path)
  try:
    for strike in (cluster.pause, cluster.kill):
      leader = cluster.leader()
      with client.Client(place.parse(cluster.url).servers) as asked:
        assert "header" in asked.ask("kv/put", _KEY, time.monotonic() + 60.0)
        strike(leader)
        for _ in range(3):
          assert "header" in asked.ask("kv/put", _KEY, time.monotonic() + 60.0)
      if strike == cluster.pause:
        cluster.resume(leader)
        cluster.wait(leader)
  finally:
    cluster.close()
