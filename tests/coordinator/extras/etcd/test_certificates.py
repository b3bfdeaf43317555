"""Etcd that encrypts: renewed certificates, and wrong ones at the front door."""

import shutil
import subprocess

import commands
import etcd_cluster
import issued
import jax.numpy as jnp
import optax
import pytest

from optax_dist import coordinator
from optax_dist.cli import main
from optax_dist.coordinator.extras.etcd import client, keys
from optax_dist.coordinator.transport import addresses

SECRET = "a secret of enough bytes"

pytestmark = etcd_cluster.needs_etcd


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
  return issued.Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def files(authority):
  return authority.issue(names="DNS:localhost")


@pytest.fixture(scope="module")
def server(files, tmp_path_factory):
  """The host and port of one server that asks for certificates."""
  folder = tmp_path_factory.mktemp("etcd")
  (port,) = addresses.free_ports()
  url = f"https://localhost:{port}"
  with (folder / "log").open("wb") as log:
    made = subprocess.Popen(
      [
        *("etcd", "--data-dir", str(folder / "data")),
        *("--cert-file", files.certificate, "--key-file", files.key),
        *("--trusted-ca-file", files.authority, "--client-cert-auth"),
        *("--listen-client-urls", url, "--advertise-client-urls", url),
        *("--listen-peer-urls", "http://localhost:0"),
      ],
      stdout=log,
      stderr=log,
    )
  try:
    _ask(_url(f"localhost:{port}", files), 200.0)
    yield f"localhost:{port}"
  finally:
    made.kill()
    made.wait(60.0)


def _url(server, files):
  return (
    f"etcds://{server}?ca={files.authority}&cert={files.certificate}"
    f"&key={files.key}"
  )


def _ask(url, seconds=60.0):
  key = {"key": keys.encoded("key"), "value": ""}
  with client.Client(keys.parse(url)) as asked:
    return asked.ask("kv/put", key, seconds)


def _join(url):
  coordinator.join(
    optax.sgd(0.1),
    jnp.ones(2),
    replica=0,
    total_num_replicas=1,
    coordinator_address=url,
    secret=SECRET,
    timeout=300.0,
  )


def test_certificates_are_read_again_for_a_new_connection(
  server, files, tmp_path
):
  mine = [str(tmp_path / f"{index}.pem") for index in range(3)]
  wrong = issued.Authority(tmp_path / "other").issue()
  for path, by in zip(mine, wrong.files(), strict=True):
    shutil.copy(by, path)
  own = type(files)(*mine)
  with client.Client(keys.parse(_url(server, own))) as asked:
    for path, by in zip(mine, files.files(), strict=True):
      shutil.copy(by, path)
    assert "header" in asked.ask("kv/range", {"key": "a2V5"}, 60.0)


def test_join_ends_at_once_if_the_server_is_not_trusted(server, tmp_path):
  wrong = issued.Authority(tmp_path).issue()
  words = (
    f"{server}: its certificate can't be used: it is not signed by this side's"
    f" authority in {wrong.authority}"
  )
  with pytest.raises(coordinator.JoinRefused) as error:
    _join(_url(server, wrong))
  assert words in str(error.value)
  assert words in commands.refused_by_etcd(_url(server, wrong))


def test_certificate_that_the_server_demands_is_named_at_once(server, files):
  with pytest.raises(coordinator.JoinRefused, match="asks for a certificate"):
    _join(f"etcds://{server}?ca={files.authority}")
  # Like a server that is about to end.
  with pytest.raises(client.NoAnswer, match="its URL begins with etcds://"):
    _ask(f"etcd://{server}", 0.0)


def test_doctor_reports_an_untrusted_server(server, files, tmp_path, capsys):
  wrong = issued.Authority(tmp_path).issue()
  (tmp_path / "secret").write_text(SECRET)
  command = (
    *("doctor", "--nodes", "2", "--node-rank", "0", "--host-timeout", "0.1"),
    *("--address", f"127.0.0.1:{addresses.free_ports()[0]}", "--run", "first"),
    *("--secret-file", str(tmp_path / "secret"), "--store"),
  )
  for own, words in (
    (files, "[ok] etcds://"),
    (wrong, f"is not signed by this side's authority in {wrong.authority}"),
  ):
    assert main.main([*command, _url(server, own)]) == 1
    assert words in capsys.readouterr().out


def test_mismatched_host_name_is_named_at_once(server, files):
  url = _url(server.replace("localhost", "127.0.0.1"), files)
  with pytest.raises(
    coordinator.JoinRefused, match=r"not valid for '127\.0\.0\.1'"
  ):
    _join(url)


def test_a_file_that_can_not_be_read_is_named(server, files, authority):
  encrypted = authority.folder / "encrypted.key"
  authority.run(
    f"pkey -in {files.key} -aes256 -passout pass:phrase -out {encrypted}"
  )
  for part, words in (
    (("cert", files.certificate, "none.pem"), "No such file or directory"),
    (("key", files.key, encrypted), "is encrypted with a pass phrase"),
  ):
    name, old, new = part
    url = _url(server, files).replace(f"{name}={old}", f"{name}={new}")
    with pytest.raises(ValueError, match=words):
      _join(url)
    assert words in commands.refused_by_etcd(url)
