"""What a launcher has to do with the coordinator of its job."""

from __future__ import annotations

import contextlib
import pathlib
import time
from collections.abc import Callable, Mapping

import msgspec

from optax_dist.coordinator.launch import keeper, line, output
from optax_dist.coordinator.launch.environment import Environment
from optax_dist.coordinator.launch.placement import Placement
from optax_dist.coordinator.server import log as server_log
from optax_dist.coordinator.server import process as server_process
from optax_dist.coordinator.server.process import Settings

_POLL_SECONDS = 0.1
# Seconds after a signal in which it goes on for other hosts.
_FAREWELL = 3.0


class Coordination:
  """Keeps the coordinator running if it belongs on this host, and talks with it.

  Attributes:
    address: where members find it.
    line: the connection to it.
    close: ends both.
  """

  def __init__(
    self,
    placement: Placement,
    environment: Environment,
    *,
    folder: pathlib.Path | None,
    log: pathlib.Path | None,
    continues: bool,
    env: Mapping[str, str],
    echo: output.Echo,
  ):
    """Starts it, if it belongs here. With one in etcd, each host has a standby.

    Args:
      placement: what runs on this host.
      environment: that of all replicas.
      folder: see `Launcher`.
      log: see `Launcher`.
      continues: see `Launcher`.
      env: variables to add to this process's own.
      echo: called with each line of output.

    Raises:
      RuntimeError, TimeoutError: it can't start.
      LogError: its log can't be continued.
    """
    self._nodes, self._echo = placement.node.count, echo
    self._keeper: keeper.Keeper | None = None
    self.address = environment.store or placement.node.address or ""
    settings = (
      placement.coordinator()
      if environment.store is None
      else Settings(bind=environment.local_addr)
    )
    with contextlib.ExitStack() as stack:
      if settings is not None:
        self.address = self.address or f"{settings.bind}:{settings.port}"
        if environment.store is None:
          settings = self._with_log(
            settings, log, continues, placement.replicas
          )
        path = folder and folder / "coordinator.log"
        printed = output.OutputRelay("coordinator", file=path, echo=echo)
        stack.callback(printed.end)
        say = lambda text: printed.take(f"{text}\n".encode(), True)
        try:
          self._keeper = keeper.Keeper(settings, environment, say, env)
        except server_process.PortTaken as error:
          raise RuntimeError(
            f"{error} Most likely another launcher has --node-rank 0 of this job,"
            " or another job has this --address."
          ) from None
        stack.callback(self._keeper.stop)
      self.line = line.Line(self.address, environment, placement, self._say)
      stack.callback(self.line.close)
      self.close = stack.pop_all().close

  def _with_log(
    self,
    settings: Settings,
    log: pathlib.Path | None,
    continues: bool,
    replicas: int,
  ) -> Settings:
    """Settings with a log that is of this run."""
    assert settings.port is not None
    log = log or server_process.default_log(settings.port)
    if not (continues and server_log.goes_on(log, replicas)):
      server_log.forget(log)
    return msgspec.structs.replace(settings, log=str(log))

  @property
  def files(self) -> list[int]:
    """Descriptors to wait for."""
    file = -1 if self._keeper is None else self._keeper.file
    return [] if file < 0 else [file]

  def poll(self) -> None:
    """Has the coordinator started again if it has died."""
    if self._keeper is not None:
      self._keeper.poll()

  def linger(self, stops: Callable[[], bool]) -> None:
    """Keeps the coordinator as long as replicas on other hosts need it.

    Args:
      stops: whether it is to end soon in any case.
    """
    if self._keeper is None or self._nodes == 1:
      return
    self._keeper.drain()
    began, said = time.monotonic(), False
    while not self._keeper.drained:
      self._keeper.poll()
      time.sleep(_POLL_SECONDS)
      late = time.monotonic() - began > _FAREWELL
      if late and stops():
        return
      if late and not said:
        said = True
        self._say(
          "its replicas have ended; it coordinates those of other hosts until they"
          " have, too"
        )

  def _say(self, text: str) -> None:
    self._echo("launch", text, True)
