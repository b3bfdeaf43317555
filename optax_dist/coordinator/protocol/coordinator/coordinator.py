"""The coordinator: messages in, decisions out; never a large gradient.

It is a process of its own, no replica. It writes each decision into its log before it
sends anything, so it may be killed at any time: the next coordinator continues from
the log. TensorFlow calls it chief.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import inputs as ins
from optax_dist.coordinator.protocol import journal_events
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.codec import replace
from optax_dist.coordinator.protocol.config import Config
from optax_dist.coordinator.protocol.coordinator.hosts import Hosts
from optax_dist.coordinator.protocol.coordinator.meetings import Meetings
from optax_dist.coordinator.protocol.coordinator.outbox import Outbox
from optax_dist.coordinator.protocol.coordinator.run import Run
from optax_dist.coordinator.protocol.effects import Effect
from optax_dist.coordinator.protocol.entries import (
  Began,
  Epoch,
  Job,
  Process,
)
from optax_dist.coordinator.protocol.history import History
from optax_dist.coordinator.protocol.inputs import Input


class Coordinator:
  """The protocol core of the coordinator's process.

  Attributes:
    history: all decisions in its log.
    hosts: the launchers.
  """

  def __init__(
    self,
    configure: Callable[[Job], Config],
    history: History,
    nonce: str,
  ):
    """Continues a log, which may be empty.

    Args:
      configure: makes a run's configuration from its job.
      history: all decisions in the log.
      nonce: a random text for signatures between members.
    """
    self._configure, self.history, self._nonce = configure, history, nonce
    self._out = Outbox(history)
    self.hosts, self._meetings = Hosts(), Meetings()
    self._run: Run | None = None
    self._connected: set[Process] = set()
    self._bad = 0

  def step(self, input_: Input, now: float) -> list[Effect]:
    """Processes an input; returns the effects, in order."""
    self._handle(input_, now)
    if self._run is not None and self._run.begins_again is not None:
      self._begin(self._run.begins_again, now)
    return self._out.take()

  def deadline(self) -> float:
    """When `TimePassed` must be the next input, at the latest."""
    return math.inf if self._run is None else self._run.deadline()

  @property
  def is_over(self) -> bool:
    """Whether the run has ended."""
    return self.history.ended is not None

  def _handle(self, input_: Input, now: float) -> None:
    match input_:
      case ins.Started():
        self._start(now)
        return
      case ins.Received(peer, msg.Meet() as meet):
        self._out.add(*self._meetings.called(peer, meet))
        return
      case ins.Received(peer, msg.Host() as host):
        self._out.add(*self.hosts.called(peer, host))
        if self.history.ended is not None:
          self._out.send(peer, self.history.ended)
      case ins.Received(peer, message):
        self._connected.add(peer)
        if isinstance(message, msg.Hello):
          if not self._makes_a_run(peer, message):
            return
          # Before this coordinator has a run it has welcomed no process. So a process
          # that was welcomed in this epoch has followed a different coordinator.
          welcomed_by = self.history.epoch - (self._run is None)
          if message.epoch > welcomed_by and not self._follow_up(peer, message):
            return
          if message.nonce != self.history.nonce:
            # The process's membership and counters belong to another log.
            message = replace(message, incarnation=-1, beginnings=0)
            input_ = ins.Received(peer, message)
          if self._run is None:
            self._begin(Began(message.start, message.job), now)
      case ins.PeerLost(peer, how, reason):
        self._connected.discard(peer)
        self._out.add(*self._meetings.lost(peer, how, reason))
        self._out.add(*self.hosts.lost(peer, how))
      case ins.Malformed(peer, error):
        self._bad += 1
        text = f"bad message {self._bad}, of {peer}: {error}"
        self._out.add(fx.Log(text))
        self._out.send(peer, msg.Rejected(error))
    if self._run is not None:
      self._run.step(input_, now)

  def _makes_a_run(self, peer: Process, hello: msg.Hello) -> bool:
    """Whether a process's job and state are valid; if not, only it is refused."""
    what = "job"
    try:
      config = self._configure(hello.job)
      if hello.job != self.history.job:
        config.check()
      what = "state"
      hello.start.progress.check(hello.job.data)
      config.quorum_state(hello.start.step)
    except ValueError as error:
      text = f"The {what} of replica {hello.replica!r} makes no run: {error}."
      self._out.add(fx.Log(text))
      self._out.send(peer, msg.Refused(text))
      return False
    return True

  def _start(self, now: float) -> None:
    """Begins a new epoch, and continues the run that is in the log."""
    self._out.append(Epoch(self.history.epoch + 1, self._nonce))
    history = self.history
    if history.ended is None:
      self._out.note(journal_events.Coordinator(history.step, history.epoch))
    else:
      # The coordinator that ended the run may have died before it wrote this line.
      self._out.note(journal_events.finished(history.ended, history.applied))
    if history.job is not None:
      self._make_run(now)

  def _begin(self, began: Began, now: float) -> None:
    """Begins a run; if it begins again, all connected processes have to call again."""
    history, again = self.history, self._run is not None
    why = f"no replica has the state of step {history.step}"
    if began.start.step > history.step:
      why = "a replica has brought a newer state"
    text = f"{why}: the run begins again from step {began.start.step}"
    if not self.is_over and history.job != began.job:
      text = "the run begins again with the job that most replicas have"
    self._out.append(began)
    self._out.note(
      journal_events.Run(journal_events.VERSION, "", began.start.step)
    )
    if again:
      self._out.add(fx.Log(text))
      # With a new epoch, no id of a round or transfer is used twice.
      self._out.append(Epoch(self.history.epoch + 1, self._nonce))
      for peer in sorted(self._connected):
        self._out.add(fx.Disconnect(peer, "the run begins again"))
      self._connected.clear()
    self._make_run(now)

  def _follow_up(self, peer: Process, hello: msg.Hello) -> bool:
    """Handles a process which says that a later coordinator has welcomed it.

    The process's word does not end this coordinator: only the log can, which has a
    single owner. If this log is new, the earlier log is lost, and the run continues
    from the process's epoch. Otherwise the process has followed another log.

    Returns:
      Whether the process may take part.
    """
    history = self.history
    if self._run is None:
      self._out.append(Epoch(hello.epoch + 1, self._nonce))
      return True
    text = (
      f"replica {hello.replica!r} was welcomed by coordinator {hello.epoch} of its"
      f" run, and by its log this one is {history.epoch}: the log that it has"
      " followed is lost, or another run has this address"
    )
    self._out.add(fx.Log(text))
    self._out.send(peer, msg.Refused(text, again=True))
    return False

  def _make_run(self, now: float) -> None:
    assert self.history.job is not None
    config = self._configure(self.history.job)
    self._run = Run(config, self.history, self.hosts, self._out, now)
