"""Join a run as a process, or run replicas as threads."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import threading
import types
from collections.abc import Callable
from concurrent import futures
from typing import Any

import optax

from optax_dist import ledger
from optax_dist import quorum as rules
from optax_dist._internal import checks
from optax_dist.coordinator import (
  arguments,
  errors,
  memberships,
  options,
  strategies,
)
from optax_dist.coordinator import replica as replicas
from optax_dist.coordinator.data import arguments as data_arguments
from optax_dist.coordinator.data import probe as probes
from optax_dist.coordinator.launch import (
  channel,
  cluster,
  environment,
  faults,
  starter,
)
from optax_dist.coordinator.protocol import entries
from optax_dist.coordinator.runtime import endpoint as endpoints
from optax_dist.coordinator.runtime import process_exit, processes, threads
from optax_dist.coordinator.training import model, participant, preemption
from optax_dist.coordinator.transport import addresses, sockets, tls

_log = logging.getLogger("optax_dist.coordinator")


def join(
  opt: optax.GradientTransformation,
  params: Any,
  *,
  replicas_to_aggregate: int | None = None,
  total_num_replicas: int | None = None,
  coordinator_address: str | None = None,
  replica: int | None = None,
  strategy: strategies.Factory | None = None,
  max_staleness: int | None = 0,
  staleness_weight: str | None = None,
  lower_on_leave: bool = True,
  lower_on_loss: bool | None = None,
  opt_state: Any = None,
  inner_state: Any = None,
  global_step: int = 0,
  data: ledger.Batches | None = None,
  progress: ledger.Progress | None = None,
  lineage: entries.Lineage | None = None,
  probe: probes.Probe | types.EllipsisType | None = ...,
  secret: bytes | str | None = None,
  certificates: tls.Certificates | None = None,
  bind: str | None = None,
  ports: str | None = None,
  advertise: str | None = None,
  start_coordinator: bool | None = None,
  on_sigterm: str | None = None,
  **settings: Any,
) -> replicas.Replica:
  """Makes this process a replica of a run, and waits until it is admitted.

  The replicas find each other through the coordinator at `coordinator_address`,
  the environment variables that `optax-dist launch` sets (OPTAX_DIST_REPLICA and
  others: `launch.environment.Environment`), or the cluster that JAX detects
  (SLURM, GKE, TPU pods, Open MPI). Inside a replica, `shard_map` and `jit` over
  its own devices work as usual; only this coordinator communicates between
  replicas. If a replica has several processes (`initialize_processes`), all of
  them make the same calls, and its parameters have a `NamedSharding` over the
  devices of all.

  Args:
    opt: applied to the mean gradient; with a strategy that trains locally, what
      each replica applies to its own gradients.
    params: a tree of arrays of floating dtypes; their shardings are kept.
    replicas_to_aggregate: gradients in a step; by default
      OPTAX_DIST_REPLICAS_TO_AGGREGATE, or all. If it exceeds
      `total_num_replicas`, replicas sum several gradients each.
    total_num_replicas: replicas expected at the start.
    coordinator_address: ``host:port`` of the coordinator; or, with coordinators
      in etcd, ``etcd://host:2379,host:2379,host:2379`` (docs/log.md), where it is
      looked up whenever it is called.
    replica: the index of this replica, from 0.
    strategy: `elastic_average(...)`, `local_updates(...)` or
      `decoupled_diloco(...)`; by default gradients are averaged (sync replicas).
    max_staleness: largest staleness, in steps, at which a gradient still
      counts; None for no limit.
    staleness_weight: None, or "inverse" for 1 / max(1, staleness).
    lower_on_leave: whether replicas that leave gracefully (out of data) lower
      the quorum to the remaining ones.
    lower_on_loss: whether lost replicas lower it, too; by default true if
      OPTAX_DIST_MIN_REPLICAS is less than `replicas_to_aggregate`.
    opt_state: optimizer state of a checkpoint; by default `opt.init(params)`. With
      a strategy that trains locally, that of its outer optimizer.
    inner_state: with such a strategy, the state of this replica's own optimizer
      from a checkpoint. A replica that joins later gets that of the replica that
      serves the state; "fresh" for `opt.init(params)` in any case.
    global_step: step of a checkpoint.
    data: the samples that are leased to replicas (`Replica.batches`), with
      local steps those of a whole exchange; None: each replica reads its own
      data.
    progress: from a checkpoint: which samples are in committed steps.
    lineage: from a checkpoint: the runs that led to it, as `checkpoint.restore`
      returns them, so that checkpoints of other runs are not mistaken for this
      run's.
    probe: required with deterministic data, and only then: a function of
      parameters and a `micro_batches.Slot` that returns a gradient, by the
      program of the training loop. It is called twice, on pseudo-random
      parameters, and must return the same bits; a replica that gets other bits
      than the job's is refused (docs/deterministic.md). None to go without.
    secret: shared secret of the job, at least 16 bytes; by default
      OPTAX_DIST_SECRET, or the content of the file OPTAX_DIST_SECRET_FILE.
      Required if other hosts can connect.
    certificates: `transport.tls.Certificates`: files by which all traffic that
      leaves this host is encrypted, read again for each connection if they have
      changed; by default OPTAX_DIST_CERTIFICATES, three paths.
    bind: host name or address that this process listens on; by default
      OPTAX_DIST_LOCAL_ADDR, or loopback if the coordinator is on loopback, and
      all addresses otherwise.
    ports: range to take a port from, such as "29400-29499".
    advertise: the address that others connect to, as a host or ``host:port``;
      by default OPTAX_DIST_LOCAL_ADDR, or the address from which this host
      reaches the coordinator.
    start_coordinator: whether this replica starts the coordinator if nothing
      listens at its address, and starts one again that a replica has started; by
      default true if the address belongs to this host and no launcher has started
      one. Not with one in etcd, for which `optax-dist coordinator` waits on several
      hosts.
    on_sigterm: "leave" makes the replica leave gracefully after its step when
      it gets SIGTERM (or a launcher's SIGINT): `Outcome.finished` is then set.
      With "save" all replicas see `Outcome.save` first. Defaults to "leave" if
      a launcher started this process, except if the program has its own
      handler, or outside the main thread.
    **settings: fields of `Options`: deadlines, `wire`, `journal` and others; by
      default `journal` is OPTAX_DIST_JOURNAL and `run` OPTAX_DIST_RUN.

  Returns:
    The replica, a context manager: exiting it takes the replica out of the run
    gracefully; exiting it with an exception tells the others at once.

  Raises:
    ValueError, TypeError: an argument is invalid.
    JoinRefused: the job differs in parameters, optimizer, strategy or wire; or
      there can be no connection, for another secret or certificates.
    CoordinatorError: this process is that replica of that run already, and its
      program may still use it; what a notebook's cell has left is replaced.
    CoordinatorError: there is no answer within `timeout` seconds and the time
      in which a lost coordinator must be noticed (docs/coordinator.md, Deadlines).
    SystemExit: SIGTERM came before it was admitted, with `on_sigterm`.
  """
  arguments.check(locals())
  probe = data_arguments.check_probe(probe, data)
  launched = environment.Environment.read()
  which = environment.ProcessEnvironment.read()
  address, total, number = cluster.detect(
    coordinator_address,
    total_num_replicas,
    _number(replica, which),
  )
  replicas_to_aggregate = data_arguments.gradients_per_step(
    data,
    total,
    replicas_to_aggregate,
    launched.replicas_to_aggregate or total,
    strategy,
  )
  lower_on_loss = _lowers_on_loss(
    lower_on_loss, launched, min(replicas_to_aggregate, total), number
  )
  settings.setdefault("journal", launched.journal)
  settings.setdefault("run", launched.run or "")
  settings.setdefault("step_timeout", launched.step_timeout)
  program = _processes(which)
  job = _job(
    "join",
    opt,
    strategy,
    (replicas_to_aggregate, total),
    data,
    max_staleness=max_staleness,
    staleness_weight=staleness_weight,
    lower_on_leave=lower_on_leave,
    lower_on_loss=lower_on_loss,
    opt_state=opt_state,
    inner_state=inner_state,
    global_step=global_step,
    progress=progress,
    lineage=lineage,
    probe=probe,
    processes=program,
    **settings,
  )
  chosen: options.Options = job.keywords["settings"]
  line = channel.current()
  warm = bool(which.standby)
  if warm and line is not None:
    which = _stand_by(line, job, params)
    assert which.replica is not None
    number = which.replica
  if bind is None and advertise is None:
    bind = advertise = launched.local_addr
  key = _key(secret, launched)
  certificates = _certificates(certificates, launched)
  where = starter.where_to_start(
    address, which, start_coordinator, chosen.timeout
  )
  name = program.name(number)
  with (
    memberships.begin(address, chosen.run, f"{name}") as membership,
    starter.running(
      where if program.index == 0 else None, key, certificates
    ) as restart,
  ):
    endpoint = endpoints.connect(
      address,
      name,
      key,
      chosen.silence,
      bind=bind,
      ports=sockets.DEFAULT_PORTS
      if ports is None
      else addresses.parse_ports(f"{ports}"),
      advertise=advertise,
      certificates=certificates,
      restart=restart,
    )
    with endpoint.closed_on_error():
      preempted = _preemption(on_sigterm, launched, line)
      if line is not None:
        faults.install(launched, which)
      part = job(
        endpoint,
        params=params,
        replica=number,
        on_stuck=_end if line or chosen.step_timeout else None,
        follows=membership.follows,
      )
      tell = None
      if line is not None:
        tell = functools.partial(line.say, run=chosen.run)
      made = replicas.Replica(part, preempted=preempted, tell=tell)
      ends = preempted.remove if preempted is not None else lambda: None
      membership.belongs_to(made, part, ends)
    try:
      return made.start(warm)
    except SystemExit:
      _log.warning(
        "Replica %r ends before it has joined the run: it got a signal.",
        number,
      )
      raise


def _lowers_on_loss(
  argument: bool | None,
  launched: environment.Environment,
  most: int,
  number: int | None,
) -> bool:
  """Whether lost replicas lower the quorum.

  Args:
    argument: the argument of `join`.
    launched: the environment.
    most: how many replicas a step needs.
    number: this replica's number: only one replica warns.
  """
  lowers = (launched.min_replicas or most) < most
  if argument is None:
    return lowers
  if lowers and not argument and number == 0:
    _log.warning(
      "lower_on_loss=False defeats --min-replicas %d: a step needs %d replicas, and"
      " waits for those that are lost. Leave lower_on_loss out, or"
      " --min-replicas.",
      *(launched.min_replicas, most),
    )
  return argument


def _processes(
  which: environment.ProcessEnvironment,
) -> processes.Processes:
  """The processes of this replica, as many as its launcher says."""
  program = processes.of_this_program()
  if which.num_processes not in (None, program.count):
    raise ValueError(
      f"{environment.variable('num_processes')} is {which.num_processes}, and"
      f" this replica has {program.count}: call coordinator.initialize_processes()"
      " first of all."
    )
  return program


def _stand_by(
  line: channel.Channel,
  job: functools.partial[participant.Participant],
  params: Any,
) -> environment.ProcessEnvironment:
  """Compiles the update, and waits until a replica needs this process."""
  settings: options.Options = job.keywords["settings"]
  model.prepare(job.keywords["strategy"], params, settings.wire)
  return channel.stand_by(line)


def _key(
  secret: bytes | str | None, launched: environment.Environment
) -> bytes:
  """The secret of the job; empty if there is none."""
  if secret is None:
    secret = launched.find_secret()
  return secret.encode() if isinstance(secret, str) else secret or b""


def _certificates(
  argument: tls.Certificates | None, launched: environment.Environment
) -> tls.Certificates | None:
  """The certificates of this process, if it has some; refuses invalid ones."""
  with channel.refused_by(tls.CertificateError):
    certificates = argument or launched.find_certificates()
    if certificates is not None:
      tls.check(certificates)
  return certificates


def _preemption(
  on_sigterm: str | None,
  launched: environment.Environment,
  line: channel.Channel | None,
) -> preemption.Preemption | None:
  """How this process reacts to SIGTERM; None: not at all."""
  if on_sigterm is None and line is not None and launched.grace:
    on_sigterm = "leave"
  if on_sigterm is None:
    return None
  # Replicas get Ctrl-C only from the launcher, which passes it on.
  return preemption.Preemption(
    on_sigterm, launched.grace, interrupts=line is not None
  )


def _number(
  replica: int | None, which: environment.ProcessEnvironment
) -> int | None:
  """The number of this replica; None if only the environment says it.

  A process that stands by has none yet, and checks its arguments as if it were 0.
  """
  if not which.standby:
    return replica
  if replica is not None:
    raise ValueError(
      "a process of --standby learns its number in join, when a replica dies; got"
      f" replica={replica!r}. Leave it out."
    )
  return 0


def run_embedded(
  fn: Callable[[replicas.Replica], Any],
  num_replicas: int,
  opt: optax.GradientTransformation,
  params: Any,
  *,
  replicas_to_aggregate: int | None = None,
  strategy: strategies.Factory | None = None,
  data: ledger.Batches | None = None,
  **options: Any,
) -> list[Any]:
  """Runs replicas as threads of this process: no server, no port.

  Args:
    fn: the training function, called once per replica with its `Replica`, in a
      thread of its own. When it returns, the replica leaves the run.
    num_replicas: replicas, numbered from 0.
    opt: see `join`.
    params: see `join`.
    replicas_to_aggregate: see `join`.
    strategy: see `join`.
    data: see `join`.
    **options: others of `join` that concern the job and not this process:
      `max_staleness`, `staleness_weight`, `lower_on_leave`, `lower_on_loss`,
      `opt_state`, `inner_state`, `global_step`, `progress`, `lineage`; and fields of
      `Options`.

  Returns:
    What `fn` returned, by replica.

  Raises:
    The error of the replica that failed first; a replica whose `fn` fails is
    lost to the others, which go on if enough of them are left, or end at once.
    KeyboardInterrupt: after all replicas have ended, each in its next call.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> def train(replica):
    ...   while replica.global_step < 5:
    ...     replica.step(jax.grad(lambda w: jnp.sum((w - 3.0) ** 2))(replica.params))
    ...   return float(replica.params)
    >>> run_embedded(train, 2, optax.sgd(0.25), jnp.zeros(()))
    [2.90625, 2.90625]
  """
  checks.kind("fn", fn, Callable, "a function of a Replica")
  num_replicas = checks.count("num_replicas", num_replicas)
  arguments.check({"replicas_to_aggregate": replicas_to_aggregate, **options})
  data_arguments.check_probe(options.get("probe"), data)
  k = data_arguments.gradients_per_step(
    data, num_replicas, replicas_to_aggregate, num_replicas, strategy
  )
  each = processes.Processes()
  each.may_restart = False
  job = _job(
    *("run_embedded", opt, strategy, (k, num_replicas), data),
    processes=each,
    **options,
  )
  results: list[Any] = [None] * num_replicas
  failures: list[tuple[bool, BaseException]] = []
  parts: list[participant.Participant] = []
  started = threading.Barrier(num_replicas)

  def run(index: int) -> None:
    try:
      endpoint = world.connect(str(index))
      with endpoint.closed_on_error():
        part = job(endpoint, params=params, replica=index)
        parts.append(part)
        replica = replicas.Replica(part)
      with replica.start():
        # All replicas join first: otherwise one that is done at once would end the run
        # before others join.
        with contextlib.suppress(threading.BrokenBarrierError):
          started.wait()
        results[index] = fn(replica)
    except BaseException as error:
      started.abort()
      # Errors caused by another replica's failure are raised last.
      failures.append((isinstance(error, errors.CoordinatorError), error))

  target = threads.in_this_precision(run)
  with (
    endpoints.World() as world,
    futures.ThreadPoolExecutor(num_replicas, "optax-dist-embedded") as pool,
  ):
    running = [pool.submit(target, index) for index in range(num_replicas)]
    try:
      futures.wait(running)
    except BaseException:
      # Without this, the replicas' threads would go on training, with no way to stop
      # them.
      interrupted = errors.CoordinatorError("run_embedded was interrupted.")
      started.abort()
      while futures.wait(running, 0.1).not_done:
        for part in list(parts):
          part.inbox.fail(interrupted)
          part.inbox.wake()
      raise
  if failures:
    raise min(failures, key=lambda f: f[0])[1]
  return results


def _end(reason: str) -> None:
  """Ends a process whose training loop is stuck."""
  process_exit.end_process(f"This process ends because it is {reason}.")


def _job(
  user: str,
  opt: optax.GradientTransformation,
  factory: strategies.Factory | None,
  replicas: tuple[int, int],
  data: ledger.Batches | None,
  *,
  max_staleness: int | None = 0,
  staleness_weight: str | None = None,
  lower_on_leave: bool = True,
  lower_on_loss: bool = False,
  global_step: int = 0,
  progress: ledger.Progress | None = None,
  lineage: entries.Lineage | None = None,
  processes: processes.Processes | None = None,
  opt_state: Any = None,
  inner_state: Any = None,
  probe: probes.Probe | None = None,
  **settings: Any,
) -> functools.partial[participant.Participant]:
  """Checks what all replicas of a job have in common; makes its participants.

  Args:
    user: the function that was called, for messages.
    opt: see `join`.
    factory: makes the strategy; None for sync replicas.
    replicas: how many gradients are in a step, and of how many replicas.
    data: see `join`; so are all others.
  """
  k, total = replicas
  k, _, late = rules.check_sync_arguments(k, total, max_staleness)
  global_step = checks.count("global_step", global_step, least=0)
  checks.one_of("staleness_weight", staleness_weight, (None, "inverse"))
  if isinstance(inner_state, str):
    checks.one_of("inner_state", inner_state, ("fresh",))
  checks.flag("lower_on_leave", lower_on_leave)
  checks.flag("lower_on_loss", lower_on_loss)
  quorum = strategies.Quorum(
    k, total, late, staleness_weight, lower_on_leave, lower_on_loss
  )
  strategy = _strategy(factory, opt, quorum)
  count = 1 if processes is None else processes.count
  data_arguments.check(data, progress, strategy, global_step, count)
  chosen = options.of(user, settings)
  if chosen.max_skipped is not None and data is None:
    raise ValueError(
      f"max_skipped={chosen.max_skipped} needs data=Batches(...): without it no"
      " samples are leased, and none are skipped."
    )
  return functools.partial(
    participant.Participant,
    strategy=strategy,
    settings=chosen,
    opt_state=opt_state,
    inner_state=inner_state,
    global_step=global_step,
    processes=processes,
    data=data,
    progress=progress and dataclasses.replace(progress, data=None),
    lineage=entries.as_lineage(lineage),
    probe=probe,
  )


def _strategy(
  factory: strategies.Factory | None,
  opt: optax.GradientTransformation,
  quorum: strategies.Quorum,
) -> strategies.Strategy:
  """What replicas share, keep and send.

  Raises:
    TypeError: the argument is no strategy's factory.
  """
  if factory is None:
    return strategies.SyncReplicas(opt, quorum)
  try:
    # A function such as `elastic_average` that was passed without calling it does not
    # take these arguments.
    inspect.signature(factory).bind(opt, quorum)
  except TypeError:
    strategy = None
  else:
    strategy = factory(opt, quorum)
  if not isinstance(strategy, strategies.Strategy):
    shown = getattr(factory, "__name__", repr(factory))
    raise TypeError(
      "strategy must be what elastic_average(...), local_updates(...) or"
      f" decoupled_diloco(...) of the coordinator returns, got {shown:.100}."
    )
  return strategy
