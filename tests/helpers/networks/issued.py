"""Authorities and certificates, made by openssl."""

import pathlib
import secrets
import shutil
import subprocess

import pytest

from optax_dist.coordinator.transport import tls

_EC = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"


class Authority:
  """A job's authority, with its files in a folder of its own."""

  def __init__(self, folder):
    if shutil.which("openssl") is None:
      pytest.skip("openssl makes the certificates, and is not here")
    self.folder = pathlib.Path(folder)
    self.folder.mkdir(parents=True, exist_ok=True)
    self.path = self.folder / "ca.pem"
    # Not two of one name.
    name = secrets.token_hex(8)
    self.run(
      f"req -x509 {_EC} -days 2 -subj /CN={name} -keyout ca.key -out ca.pem"
    )

  def run(self, command):
    """Runs openssl in the folder."""
    subprocess.run(
      ["openssl", *command.split()],
      cwd=self.folder,
      check=True,
      capture_output=True,
      timeout=60,
    )

  def issue(self, name="me", usage="", days=2, names=""):
    """A certificate and its key.

    Args:
      name: of its files.
      usage: its extended key usage; "" for none.
      days: for how long it is valid; negative if it has expired.
      names: the names of its host, such as DNS:localhost; "" for none.
    """
    extensions = {"extendedKeyUsage": usage, "subjectAltName": names}
    (self.folder / "extensions").write_text(
      "".join(f"{key}={value}\n" for key, value in extensions.items() if value)
    )
    self.run(f"req {_EC} -subj /CN=replica -keyout {name}.key -out {name}.csr")
    self.run(
      f"x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial"
      f" -days {days} -out {name}.pem -extfile extensions"
    )
    return tls.Certificates(
      *(str(self.folder / file) for file in (f"{name}.pem", f"{name}.key")),
      str(self.path),
    )
