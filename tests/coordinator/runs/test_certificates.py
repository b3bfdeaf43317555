"""Certificates as `join` is given them: renewed in mid-run, and wrong ones."""

import dataclasses
import pathlib
import re
import shutil
import threading

import issued
import jax.numpy as jnp
import optax
import pytest
import waiting

from optax_dist import coordinator
from optax_dist.coordinator.server import process
from optax_dist.coordinator.transport import addresses, tls

SECRET = "a secret of enough bytes"
# Longer than any test waits: an error that comes at once is not a timeout.
PATIENT = {
  "timeout": 300.0,
  "transfer_timeout": 100.0,
  "silence_timeout": 100.0,
}


def join(address, replica=0, **options):
  return coordinator.join(
    optax.sgd(0.5),
    jnp.zeros(2),
    replica=replica,
    coordinator_address=address,
    secret=SECRET,
    **{"start_coordinator": False, "total_num_replicas": 2} | PATIENT | options,
  )


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
  return issued.Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def good(authority):
  return authority.issue()


@pytest.fixture(scope="module")
def place(good, tmp_path_factory):
  log = tmp_path_factory.mktemp("coordinator") / "log"
  with process.start(
    SECRET.encode(), port=0, log=log, certificates=good
  ) as made:
    yield made.address


def test_certificates_may_be_replaced_during_a_run(tmp_path):
  files = issued.Authority(tmp_path / "old").issue()
  new = issued.Authority(tmp_path / "new").issue()
  with process.start(
    SECRET.encode(), port=0, log=tmp_path / "log", certificates=files
  ) as made:
    options = {"lower_on_leave": True, "replicas_to_aggregate": 1}
    with join(made.address, certificates=files, **options) as first:
      assert first.step(jnp.ones(2)).accepted
      for old, by in zip(files.files(), new.files(), strict=True):
        shutil.copy(by, old)
      # A new process has only the new ones, and the coordinator reads them too.
      with join(made.address, 1, certificates=new, **options) as second:
        assert second.step(jnp.ones(2)).global_step >= 2
      first.step(jnp.ones(2))  # It has missed the steps of the other one.
      assert first.step(jnp.ones(2)).accepted


def _missing(good, authority, tmp_path):
  return dataclasses.replace(good, key=str(tmp_path / "no.key"))


def _encrypted(good, authority, tmp_path):
  key = tmp_path / "encrypted.key"
  authority.run(f"pkey -in {good.key} -aes256 -passout pass:phrase -out {key}")
  return dataclasses.replace(good, key=str(key))


def _of_another(good, authority, tmp_path):
  return dataclasses.replace(good, key=authority.issue("another").key)


def _rsa(good, authority, tmp_path):
  key = tmp_path / "rsa.key"
  authority.run(f"genpkey -algorithm RSA -out {key}")
  return dataclasses.replace(good, key=str(key))


def _swapped(good, authority, tmp_path):
  return tls.Certificates(good.key, good.certificate, good.authority)


def _damaged(good, authority, tmp_path):
  path = tmp_path / "cut.pem"
  path.write_bytes(pathlib.Path(good.certificate).read_bytes()[:200])
  return dataclasses.replace(good, certificate=str(path))


def _expired(good, authority, tmp_path):
  return authority.issue("expired", days=-1)


def _other_authority(good, authority, tmp_path):
  other = issued.Authority(tmp_path / "other")
  return dataclasses.replace(good, authority=str(other.path))


def _for_servers(good, authority, tmp_path):
  return authority.issue("server", "serverAuth")


_WRONG = {
  _missing: "The key in {key} can't be read: No such file or directory.",
  _encrypted: "The key in {key} is encrypted with a pass phrase",
  _of_another: "The key in {key} does not belong to the certificate in"
  " {certificate}.",
  _rsa: "The key in {key} does not belong to the certificate in {certificate}.",
  _swapped: "The certificate in {certificate} is no certificate in PEM",
  _damaged: "The certificate in {certificate} can't be used",
  _expired: "The certificate in {certificate} can't be used: it has expired.",
  _other_authority: "The certificate in {certificate} can't be used: it is not"
  " signed by the authority in {authority}",
  _for_servers: "The certificate in {certificate} can't be used: its extended"
  " key usage is for servers only",
}


@pytest.mark.parametrize("make", _WRONG)
def test_join_names_what_is_wrong_with_its_own_certificates(
  make, good, authority, tmp_path, place
):
  files = make(good, authority, tmp_path)
  words = _WRONG[make].format(**dataclasses.asdict(files))
  with pytest.raises(ValueError, match=re.escape(words)):
    join(place, certificates=files)


def test_join_refuses_anything_but_certificates(place, good):
  with pytest.raises(ValueError, match="`certificates` must be Certificates"):
    join(place, certificates=good.files())


def test_join_refuses_a_coordinator_of_another_authority(place, tmp_path):
  files = issued.Authority(tmp_path).issue()
  with pytest.raises(coordinator.JoinRefused) as error:
    join(place, certificates=files)
  assert str(error.value).startswith(
    f"No connection with the coordinator at {place}: its certificate can't be"
    f" used: it is not signed by this side's authority in {files.authority}"
  )


def test_join_without_certificates_is_refused_if_the_coordinator_has_some(
  place,
):
  with pytest.raises(
    coordinator.JoinRefused,
    match="this side has certificates, and the other side none",
  ):
    join(place)


def test_join_with_certificates_is_refused_if_the_coordinator_has_none(
  good, tmp_path
):
  with (
    process.start(SECRET.encode(), port=0, log=tmp_path / "log") as made,
    pytest.raises(
      coordinator.JoinRefused, match="it has no certificates, and this side has"
    ),
  ):
    join(made.address, certificates=good)


def test_coordinator_may_have_a_certificate_for_servers_only(
  authority, tmp_path, good
):
  files = authority.issue("server", "serverAuth")
  with (
    process.start(
      SECRET.encode(), port=0, log=tmp_path / "log", certificates=files
    ) as made,
    join(made.address, certificates=good, total_num_replicas=1) as replica,
  ):
    assert replica.step(jnp.ones(2)).accepted


def test_join_finds_certificates_in_the_environment(place, good, monkeypatch):
  monkeypatch.setenv("OPTAX_DIST_CERTIFICATES", ":".join(good.files()))
  options = {"total_num_replicas": 1, "run": "of one"}
  with join(place, **options) as replica:
    assert replica.step(jnp.ones(2)).accepted
  monkeypatch.setenv("OPTAX_DIST_CERTIFICATES", good.certificate)
  with pytest.raises(ValueError, match=r"me\.pem:me\.key:ca\.pem; got"):
    join(place)


def test_members_that_distrust_each_other_are_named_before_the_timeout(
  tmp_path, monkeypatch, caplog
):
  """The coordinator trusts both authorities, and each of them only its own."""
  monkeypatch.setattr(addresses, "has_unix", lambda: False)  # As between hosts.
  kinds = [issued.Authority(tmp_path / name) for name in "abc"]
  files = []
  for index, kind in enumerate(kinds):
    trusted = kinds if index == 2 else (kind, kinds[2])
    bundle = tmp_path / f"{index}.pem"
    bundle.write_text("".join(one.path.read_text() for one in trusted))
    files.append(dataclasses.replace(kind.issue(), authority=str(bundle)))
  ended = threading.Event()

  def train(number, address):
    with join(
      address, number, certificates=files[number], inline_bytes=0
    ) as replica:
      while not ended.is_set():
        replica.step(jnp.ones(2))

  with process.start(
    SECRET.encode(), port=0, log=tmp_path / "log", certificates=files[2]
  ) as made:
    threads = [
      threading.Thread(target=train, args=(number, made.address))
      for number in (0, 1)
    ]
    for thread in threads:
      thread.start()
    named = (
      r"replica (0|1) can't exchange with replica (0|1), and the step needs both:"
      r" .*certificate.* is not signed by"
    )
    try:
      # Long before the `timeout` of these.
      waiting.until(lambda: re.search(named, caplog.text), lambda: caplog.text)
    finally:
      ended.set()
      for thread in threads:
        thread.join(100.0)
