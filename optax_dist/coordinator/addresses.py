"""Addresses of the form ``host:port``."""

from __future__ import annotations

import os
import socket


def split(address: str) -> tuple[str, int]:
  """Splits ``host:port``, where an IPv6 host may stand in brackets."""
  host, colon, port = address.rpartition(":")
  if not colon or not host or not port.isdecimal() or int(port) > 65535:
    raise ValueError(
      f"An address is host:port, such as 127.0.0.1:29400; got {address!r}."
    )
  return host.removeprefix("[").removesuffix("]"), int(port)


def bypass_proxy(host: str) -> None:
  """Keeps gRPC from asking a web proxy for a host of the job."""
  own, general = "no_grpc_proxy", "no_proxy"  # It reads the first one it finds.
  name = own if own in os.environ else general
  hosts = [h for h in os.environ.get(name, "").split(",") if h]
  if host not in hosts:
    os.environ[own] = ",".join([*hosts, host])


def is_loopback(host: str) -> bool:
  """Whether a host, as it is written, can only be this one."""
  return host in ("localhost", "::1") or host.startswith("127.")


def advertised(bind: str, service: str) -> str:
  """The IP address at which peers reach this host.

  Args:
    bind: a host name or an IP address of this host, or all of its addresses.
    service: ``host:port`` of what all peers reach.
  """
  if bind in ("0.0.0.0", "::"):
    return _towards(service)
  ip = socket.gethostbyname(bind)
  # In its own tables a host's name often stands for loopback.
  return _towards(service) if is_loopback(ip) > is_loopback(bind) else ip


def _towards(service: str) -> str:
  """The IP address from which this host reaches the service."""
  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.connect(split(service))
    return s.getsockname()[0]
