"""Certificates: read from their files, again whenever these change.

A faulty certificate is found when its files are read, by a handshake with itself in
memory; the error says which file, which side and why. Faults that only the other side
can know come out of the handshake with it (`explain`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pathlib
import ssl
import time
from collections.abc import Callable, Iterator
from typing import Generic, NoReturn, TypeVar

from optax_dist.coordinator._internal.files import check_regular

_log = logging.getLogger("optax_dist.coordinator")
_T = TypeVar("_T")

# Results of OpenSSL's verification (x509_vfy.h).
_NOT_YET, _EXPIRED, _PURPOSE, _HOST = 9, 10, 26, (62, 64)
# OpenSSL's errors if a key does not belong to the certificate.
_NO_PAIR = "KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED"
# The meaning of the other side's alerts about this side's certificate.
_ALERTS = {
  "CERTIFICATE_EXPIRED": "it has expired",
  "UNKNOWN_CA": "it is not signed by the other side's authority",
  "DECRYPT_ERROR": "it is not signed by the other side's authority",
  "UNSUPPORTED_CERTIFICATE": "its extended key usage does not allow this side"
  " of a connection",
  "CERTIFICATE_REQUIRED": "there is none",
  "BAD_CERTIFICATE": "it is not valid there, which may be for its clock",
}


class CertificateError(ValueError):
  """A certificate can't be used; the message names its file, and why."""


@dataclasses.dataclass(frozen=True)
class Certificates:
  """Files with which both sides of a connection authenticate by TLS 1.3.

  They are read again for a new connection if they have changed: replace them
  before the certificate expires.

  Attributes:
    certificate: this process's certificate, in PEM; for servers and clients, if
      it has an extended key usage.
    key: its private key, in PEM, not encrypted.
    authority: certificate of the job's own authority, in PEM: any process with
      a certificate signed by it is accepted.
  """

  certificate: str
  key: str
  authority: str

  def contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """TLS contexts for the accepting side and for the dialing side.

    Raises:
      CertificateError: they can't be used, as a server at least.
    """
    made = []
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
      context = ssl.SSLContext(protocol)
      context.minimum_version = ssl.TLSVersion.TLSv1_3
      # The authority belongs to the job, so its signature is enough.
      context.check_hostname = False
      context.verify_mode = ssl.CERT_REQUIRED
      load(context, self.certificate, self.key, self.authority)
      made.append(context)
    server, client = made
    wrong, _ = _handshake(server, client)
    if wrong is not None:
      _refuse(self, client, wrong, "dials")
    return server, client

  def files(self) -> tuple[str, ...]:
    """The paths of all files."""
    return self.certificate, self.key, self.authority


def check(files: Certificates) -> None:
  """Checks that files can be used on both sides of a connection.

  Raises:
    CertificateError: they can't.
    TypeError: they are something else.
  """
  if not isinstance(files, Certificates):
    raise TypeError(
      "certificates must be transport.tls.Certificates(certificate, key,"
      f" authority), got {files!r:.200}."
    )
  server, client = files.contexts()
  _, wrong = _handshake(server, client)
  if wrong is not None:
    _refuse(files, client, wrong, "accepts")


def _refuse(
  files: Certificates,
  context: ssl.SSLContext,
  wrong: ssl.SSLError,
  verifies: str,
) -> NoReturn:
  """Raises the error of a certificate that this process itself refuses."""
  ends = [
    ssl.cert_time_to_seconds(str(authority["notAfter"]))
    for authority in context.get_ca_certs()
  ]
  if ends and max(ends) < time.time():
    raise CertificateError(
      f"The authority in {files.authority} has expired; renew it."
    )
  why = _refusal(wrong, f"the authority in {files.authority}", verifies)
  raise CertificateError(
    f"The certificate in {files.certificate} can't be used: {why}."
  )


def load(
  context: ssl.SSLContext, certificate: str, key: str, authority: str
) -> None:
  """Reads files into a context; never asks for a pass phrase.

  Args:
    context: the context.
    certificate: path of the certificate of this side; "" for none.
    key: path of its key.
    authority: path of the certificate that signs those of the other side; "" for
      none.

  Raises:
    CertificateError: a file is missing, or has other contents.
  """
  if authority:
    _check_file(authority, "authority", "CERTIFICATE-----")
    with _named(authority, "authority"):
      context.load_verify_locations(authority)
  if not certificate:
    return
  _check_file(certificate, "certificate", "CERTIFICATE-----")
  _check_file(key, "key", "PRIVATE KEY-----")

  def refuse() -> NoReturn:
    raise CertificateError(
      f"The key in {key} is encrypted with a pass phrase, which nobody is there to"
      " type. Write it without one into a file that only its user can read:"
      f" openssl pkey -in {key} -out KEY."
    )

  try:
    context.load_cert_chain(certificate, key, refuse)
  except (ssl.SSLError, OSError) as error:
    with _named(certificate, "certificate"):
      ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(certificate)
    if getattr(error, "reason", None) in _NO_PAIR:
      raise CertificateError(
        f"The key in {key} does not belong to the certificate in {certificate}."
      ) from None
    with _named(key, "key"):
      raise


def _check_file(path: str, what: str, mark: str) -> None:
  try:
    check_regular(path)
    text = pathlib.Path(path).read_text(errors="replace")
  except OSError as error:
    raise CertificateError(
      f"The {what} in {path} can't be read: {error.strerror}."
    ) from None
  if mark not in text:
    wanted = "private key" if what == "key" else "certificate"
    raise CertificateError(
      f"The {what} in {path} is no {wanted} in PEM"
      f" (-----BEGIN {mark} is missing)."
    )


@contextlib.contextmanager
def _named(path: str, what: str) -> Iterator[None]:
  """Names the file in errors of OpenSSL."""
  try:
    yield
  except (ssl.SSLError, OSError) as error:
    reason = getattr(error, "reason", None) or "it is damaged"
    raise CertificateError(
      f"The {what} in {path} can't be used: {reason}."
    ) from None


def _handshake(
  server: ssl.SSLContext, client: ssl.SSLContext
) -> tuple[ssl.SSLError | None, ssl.SSLError | None]:
  """A handshake of two contexts; how each side's certificate is refused, if so."""
  to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
  ends = (
    client.wrap_bio(to_client, to_server),
    server.wrap_bio(to_server, to_client, server_side=True),
  )
  refused: list[ssl.SSLError | None] = [None, None]
  for _ in range(2):
    for side, end in enumerate(ends):
      try:
        end.do_handshake()
      except ssl.SSLWantReadError:
        pass
      except ssl.SSLError as error:
        refused[side] = error
        return refused[0], refused[1]
  return None, None


def _refusal(error: ssl.SSLError, authority: str, verifies: str) -> str:
  """Why a certificate was not accepted, by the side that verified it.

  Args:
    error: error of the handshake.
    authority: the authority that must have signed it.
    verifies: what the side that verifies does: "dials" or "accepts".
  """
  if not isinstance(error, ssl.SSLCertVerificationError):
    return str(error.reason or error)
  if error.verify_code == _EXPIRED:
    return "it has expired"
  if error.verify_code == _NOT_YET:
    return "it is not valid yet (does one clock go wrong?)"
  if error.verify_code == _PURPOSE:
    is_for, other = (
      ("servers", "clientAuth")
      if verifies == "accepts"
      else ("clients", "serverAuth")
    )
    return (
      f"its extended key usage is for {is_for} only, and a replica both connects"
      f" and is connected to: it needs {other}, too"
    )
  if error.verify_code in _HOST:
    return error.verify_message.rstrip(".")
  return f"it is not signed by {authority} ({error.verify_message})"


def is_plain(error: ssl.SSLError) -> bool:
  """Whether a handshake has failed because the other side speaks no TLS."""
  return error.reason in (
    "WRONG_VERSION_NUMBER",
    "RECORD_LAYER_FAILURE",
    "HTTP_REQUEST",
  )


def is_final(error: ssl.SSLError) -> bool:
  """Whether another handshake would fail too, as long as no file changes."""
  return (
    isinstance(error, ssl.SSLCertVerificationError)
    or is_plain(error)
    or "_ALERT_" in f"{error.reason}"
  )


def explain(error: ssl.SSLError, files: Certificates, dialed: bool) -> str:
  """Explains a failed handshake: which side has which fault.

  Args:
    error: the error of the handshake.
    files: the files of this side.
    dialed: whether this side has dialed.
  """
  if isinstance(error, ssl.SSLCertVerificationError):
    authority = f"this side's authority in {files.authority}"
    why = _refusal(error, authority, "dials" if dialed else "accepts")
    return f"its certificate can't be used: {why}"
  reason = str(error.reason or error)
  for alert, why in _ALERTS.items():
    if reason.endswith(f"ALERT_{alert}"):
      return f"it refuses this side's certificate in {files.certificate}: {why}"
  if is_plain(error):
    return "it has no certificates, and this side has"
  return f"no TLS with it: {reason}"


class Fresh(Generic[_T]):
  """A value that is made from files, and made again once these have changed.

  If that fails, the value made before stays in use: files are not replaced all at once.
  """

  def __init__(self, files: tuple[str, ...], make: Callable[[], _T]):
    """Makes it.

    Args:
      files: the paths.
      make: what makes it; may raise `CertificateError`.
    """
    self._files, self._make = files, make
    self._seen = self._stamps()
    self._made = make()
    # The last logged reason why the present files can't be used.
    self._trouble = ""

  def get(self) -> _T:
    """The value made from the files as they are now."""
    stamps = self._stamps()
    if stamps != self._seen:
      try:
        self._made, self._seen, self._trouble = self._make(), stamps, ""
      except CertificateError as error:
        # Next time it may work with the same files: their permissions, say, may change
        # without a trace here.
        if str(error) != self._trouble:
          self._trouble = str(error)
          _log.warning("%s The one that was read before is still used.", error)
    return self._made

  def _stamps(self) -> list[tuple[int, int, int] | None]:
    stamps: list[tuple[int, int, int] | None] = []
    for path in self._files:
      try:
        now = os.stat(path)
        stamps.append((now.st_mtime_ns, now.st_ino, now.st_size))
      except OSError:
        stamps.append(None)
    return stamps


class Contexts(Fresh[tuple[ssl.SSLContext, ssl.SSLContext]]):
  """TLS contexts for the accepting side and for the dialing side.

  Attributes:
    files: the files from which they are made.
  """

  def __init__(self, files: Certificates):
    """Reads the files; raises `CertificateError` if they can't be used."""
    super().__init__(files.files(), files.contexts)
    self.files = files
