"""Certificates that change while processes live, and handshakes that say why not."""

import dataclasses
import logging
import pathlib
import resource
import shutil

import issued
import pytest

from optax_dist.coordinator.transport import interface, sockets, tls
from tests.coordinator.transport import worlds

_LIMITS = interface.Limits(connect=100, handshake=100)


@pytest.fixture
def authority(tmp_path):
  return issued.Authority(tmp_path / "authority")


@pytest.fixture
def world(new_world):
  return new_world("tcp", limits=_LIMITS)


def _replace(files, by):
  for name in ("certificate", "key", "authority"):
    shutil.copy(getattr(by, name), getattr(files, name))


def test_old_certificates_are_used_until_all_files_are_replaced(
  authority, world, tmp_path, caplog
):
  files = authority.issue()
  world.add("a", certificates=files)
  new = issued.Authority(tmp_path / "new").issue()
  old = tls.Certificates(
    *(shutil.copy(path, tmp_path) for path in files.files())
  )
  shutil.copy(new.key, files.key)
  world.add("b", certificates=old)
  world.connect("b", "a")
  world.wait_for("b", interface.PeerUp)
  assert "does not belong to the certificate" in caplog.text
  _replace(files, new)
  world.add("c", certificates=files)
  world.connect("c", "a")
  world.wait_for("c", interface.PeerUp)


def test_unreadable_files_are_read_again_later(authority, tmp_path, caplog):
  """As where their new owner may not read them yet: that changes no times of theirs."""
  files = authority.issue()
  new = issued.Authority(tmp_path / "new").issue()
  contexts = tls.Contexts(files)
  old = contexts.get()
  _replace(files, new)
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
  try:
    assert contexts.get() is contexts.get() is old
  finally:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
  (said,) = caplog.messages
  assert "can't be read: Too many open files" in said
  assert contexts.get() is not old


def test_each_side_reports_why_it_refuses_the_other(
  authority, world, tmp_path, caplog
):
  a = authority.issue()
  other = issued.Authority(tmp_path / "other").issue()
  both = tmp_path / "both.pem"
  both.write_text(
    "".join(pathlib.Path(one.authority).read_text() for one in (a, other))
  )
  # It knows both authorities, and the other side only one.
  b = dataclasses.replace(other, authority=str(both))
  world.add("a", certificates=a)
  world.add("b", certificates=b)
  with caplog.at_level(logging.WARNING):
    world.connect("b", "a")
    (event,) = world.wait_for("b", interface.PeerLost)
  assert event.how == "refused"
  assert event.reason == (
    f"it refuses this side's certificate in {b.certificate}: it is not signed by"
    " the other side's authority"
  )
  assert "A process at 127.0.0.1 can't connect: its certificate" in caplog.text


_NO_CLIENT = "its extended key usage does not allow this side of a connection"


@pytest.mark.parametrize(
  ("options", "accepts", "dials"),
  [
    ({"days": -1}, "it has expired", "it has expired"),
    ({"usage": "clientAuth"}, "its extended key usage is for clients only", ""),
    ({"usage": "serverAuth"}, "", _NO_CLIENT),
  ],
)
def test_peers_name_a_certificate_that_became_invalid_during_the_run(
  authority, world, monkeypatch, options, accepts, dials
):
  """A certificate may become invalid after it was read."""
  # As if it had been good when it was read.
  monkeypatch.setattr(tls, "_handshake", lambda server, client: (None, None))
  good, bad = authority.issue("good"), authority.issue("bad", **options)
  if accepts:
    world.add("a", certificates=bad)
    world.add("b", certificates=good)
    world.connect("b", "a")
    (event,) = world.wait_for("b", interface.PeerLost)
    assert event.how == "refused"
    assert f"its certificate can't be used: {accepts}" in event.reason
  if dials:
    world.add("c", certificates=bad)
    world.add("d", certificates=good)
    world.connect("c", "d")
    (event,) = world.wait_for("c", interface.PeerLost)
    assert event == interface.PeerLost(
      "d",
      "refused",
      f"it refuses this side's certificate in {bad.certificate}: {dials}",
    )


def test_peer_that_has_refused_is_not_called_again_at_once(
  authority, new_world, tmp_path
):
  """Rounds fail at once, and others follow: some hundred in a second."""
  clock = worlds.VirtualClock()
  world = new_world("tcp", limits=_LIMITS, clock=clock)
  world.add("a", certificates=authority.issue())
  files = issued.Authority(tmp_path / "other").issue()
  b = world.add("b", certificates=files)
  world.connect("b", "a")
  world.wait_for("b", interface.PeerLost)
  world.connect("b", "a")
  before = clock()
  assert b._connections.dialer.dials["a"].link is None
  # Meanwhile the file is replaced.
  _replace(files, authority.issue("b"))
  world.wait_for("b", interface.PeerUp)
  assert clock() >= before + 1.0 - clock.STEP


def test_refusing_address_is_named_though_another_does_not_answer(
  authority, world, tmp_path
):
  world.add("a", certificates=authority.issue())
  other = issued.Authority(tmp_path / "other").issue()
  b = world.add("b", certificates=other)
  with sockets.listening.listen(None, [0], None, None, True).sockets[0] as free:
    port = free.getsockname()[1]
  b.connect("a", f"{world.address('a')},127.0.0.1:{port}")
  (event,) = world.wait_for("b", interface.PeerLost)
  assert event.how == "refused"
  assert "its certificate can't be used" in event.reason
