"""Where members find the coordinator: at an address, or by asking etcd."""

from __future__ import annotations

import importlib
from typing import Any

from optax_dist.coordinator.server import process

_ETCD = "optax_dist.coordinator.extras.etcd"
_SCHEMES = ("etcd", "etcds")


def in_etcd(address: str) -> Any:
  """The `keys.Etcd` that an address names; None for ``host:port``.

  Raises:
    ValueError: it is a URL, but none of etcd.

  Example:
    >>> str(in_etcd("etcd://me:word@a,b"))
    'etcd://a:2379,b:2379'
    >>> in_etcd("10.0.0.1:29300")
  """
  scheme, mark, _ = address.partition("://")
  if not mark:
    return None
  if scheme not in _SCHEMES:
    shown = address.rpartition("@")[2]
    raise ValueError(
      "A coordinator is at host:port, or found by etcd://host:2379,host:2379,"
      f"host:2379; got {shown!r}."
    )
  return load("keys").parse(address)


def of_coordinator(option: str | None, variable: str | None) -> str | None:
  """The URL of etcd that a coordinator is given; None for none.

  Args:
    option: option of a command line.
    variable: variable of the environment.

  Raises:
    ValueError: it is not one, or others could read its password there.
  """
  url = option or variable or None
  if url and in_etcd(url) is None:
    shown = url.rpartition("@")[2]
    raise ValueError(f"{process.STORE_VARIABLE} is no URL of etcd: {shown!r}.")
  if option and in_etcd(option) and load("keys").parse(option).password:
    raise ValueError(
      "Others can read the password on a command line: put the URL into"
      f" {process.STORE_VARIABLE}."
    )
  return url


def load(module: str) -> Any:
  """Imports a module of the optional part, which most runs don't need."""
  return importlib.import_module(f"{_ETCD}.{module}")
