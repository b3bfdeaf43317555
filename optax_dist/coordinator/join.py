"""Take part in a run: as a process of its own, or as a thread."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any, Literal

import optax

from optax_dist import quorum as rules
from optax_dist.coordinator import embedded, errors, options, policies
from optax_dist.coordinator import replica as replicas

SECRET_VARIABLE = "OPTAX_DIST_SECRET"
# Numbers that are free for replicas that come in place of others.
_SPARE = 64
# Seconds after which a service that `join` started ends, if nobody is there.
_IDLE = 60.0


def join(
  opt: optax.GradientTransformation,
  params: Any,
  *,
  replicas_to_aggregate: int | None = None,
  total_num_replicas: int | None = None,
  coordinator_address: str | None = None,
  replica: int | None = None,
  policy: policies.Factory | None = None,
  max_staleness: int = 0,
  staleness_weight: str | None = None,
  lower_on_leave: bool = True,
  lower_on_loss: bool = False,
  opt_state: Any = None,
  global_step: int = 0,
  secret: bytes | str | None = None,
  exchange: Literal["auto", "shared_memory", "transfer"] = "auto",
  bind: str = "127.0.0.1",
  start_service: bool | None = None,
  **settings: Any,
) -> replicas.Replica:
  """Makes this process a replica of a run, and waits until it is let in.

  The replicas find each other at `coordinator_address`, or by the environment
  variables OPTAX_DIST_COORDINATOR_ADDRESS, OPTAX_DIST_NUM_REPLICAS and
  OPTAX_DIST_REPLICA, or by what JAX knows of the cluster (SLURM, GKE, TPU
  pods, Open MPI). Inside a replica `shard_map` and `jit` over its own devices
  go on as they are; between replicas nothing runs but this.

  Args:
    opt: what is applied to the mean gradient; for a policy that trains
      locally, what each replica applies to its own.
    params: a tree of arrays of floating dtypes; their shardings are kept.
    replicas_to_aggregate: gradients that make a step; by default all. More
      than `total_num_replicas` are shared out: a replica sums several.
    total_num_replicas: replicas expected at the start.
    coordinator_address: ``host:port`` of the service.
    replica: this one's number, from 0.
    policy: `elastic_average(...)` or `local_updates(...)`; by default
      gradients are averaged (sync replicas).
    max_staleness: steps by which a gradient may be late and still count.
    staleness_weight: None, or "inverse" for 1 / max(1, staleness).
    lower_on_leave: whether replicas that leave in good order (out of data)
      lower the quorum to those who are left.
    lower_on_loss: whether lost replicas lower it, too.
    opt_state: of a checkpoint; by default `opt.init(params)`.
    global_step: of a checkpoint.
    secret: of the job; by default OPTAX_DIST_SECRET. Needed where the service
      listens beyond loopback.
    exchange: "shared_memory" (replicas of one host), "transfer"
      (`jax.experimental.transfer`), or "auto" for either as it can be.
    bind: the address that this process listens at.
    start_service: whether replica 0 starts the service if nothing listens at
      the address; by default, if the address is on loopback.
    **settings: fields of `Options`: deadlines, `wire`, `journal` and others.

  Returns:
    The replica, a context manager: leaving it takes the replica out of the
    run in good order.

  Raises:
    ValueError, TypeError: an argument is not what it must be.
    JoinRefused: the job differs in parameters, optimizer, policy or wire.
    CoordinatorError: nobody answers within `timeout` seconds.
  """
  from optax_dist.coordinator import jax_runtime, service

  address, total, number = _place(
    coordinator_address, total_num_replicas, replica
  )
  chosen = _policy(
    opt,
    policy,
    policies.Quorum(
      total if replicas_to_aggregate is None else replicas_to_aggregate,
      total,
      max_staleness,
      staleness_weight,
      lower_on_leave,
      lower_on_loss,
    ),
  )
  local = address.rpartition(":")[0] in ("127.0.0.1", "localhost", "[::1]")
  key = _secret(secret, local and bind in ("127.0.0.1", "localhost", "::1"))
  told = options.Options(secret=key, **settings)
  hosted = None
  if number == 0 and (local if start_service is None else start_service):
    with contextlib.suppress(RuntimeError):  # It runs already.
      hosted = service.start(
        address, total + _SPARE, lifeline=False, idle=_IDLE
      )
  engine = jax_runtime.connect(
    address,
    number,
    timeout=min(told.timeout, 60.0),
    exchange=exchange,
    bind=bind,
  )
  try:
    made = replicas.Replica(
      engine,
      chosen,
      params,
      replica=number,
      settings=told,
      opt_state=opt_state,
      global_step=global_step,
    )
    return made.start()
  except BaseException:
    engine.close()
    if hosted is not None:
      hosted.stop()
    raise


def run_embedded(
  fn: Callable[[replicas.Replica], Any],
  num_replicas: int,
  opt: optax.GradientTransformation,
  params: Any,
  *,
  replicas_to_aggregate: int | None = None,
  policy: policies.Factory | None = None,
  max_staleness: int = 0,
  staleness_weight: str | None = None,
  lower_on_leave: bool = True,
  lower_on_loss: bool = False,
  opt_state: Any = None,
  global_step: int = 0,
  world: embedded.World | None = None,
  **settings: Any,
) -> list[Any]:
  """Runs replicas as threads of this process: no server, no port.

  Args:
    fn: what each replica does, given its `Replica`; called once in a thread
      for each. When it returns the replica leaves the run.
    num_replicas: replicas, numbered from 0.
    opt: see `join`.
    params: see `join`.
    replicas_to_aggregate: see `join`.
    policy: see `join`.
    max_staleness: see `join`.
    staleness_weight: see `join`.
    lower_on_leave: see `join`.
    lower_on_loss: see `join`.
    opt_state: see `join`.
    global_step: see `join`.
    world: shared by runs that are to meet; by default one of its own.
    **settings: fields of `Options`.

  Returns:
    What `fn` returned, by replica.

  Raises:
    The error of the replica that failed first; a replica whose `fn` fails is
    lost to the others, who go on if they are enough.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> def train(replica):
    ...   while replica.global_step < 5:
    ...     replica.step(jax.grad(lambda w: jnp.sum((w - 3.0) ** 2))(replica.params))
    ...   return float(replica.params)
    >>> run_embedded(train, 2, optax.sgd(0.25), jnp.zeros(()))
    [2.90625, 2.90625]
  """
  if type(num_replicas) is not int or num_replicas < 1:
    raise ValueError(
      f"num_replicas must be a positive integer, got {num_replicas!r}."
    )
  world = world or embedded.World()
  k = num_replicas if replicas_to_aggregate is None else replicas_to_aggregate
  quorum = policies.Quorum(
    k,
    num_replicas,
    max_staleness,
    staleness_weight,
    lower_on_leave,
    lower_on_loss,
  )
  told = options.Options(**settings)
  results: list[Any] = [None] * num_replicas
  failures: list[tuple[bool, BaseException]] = []

  def run(index: int) -> None:
    try:
      one = replicas.Replica(
        world.connect(str(index)),
        _policy(opt, policy, quorum),
        params,
        replica=index,
        settings=told,
        opt_state=opt_state,
        global_step=global_step,
      )
      with one.start():
        results[index] = fn(one)
    except BaseException as error:
      # What a replica suffers from others' failures is told last.
      failures.append((isinstance(error, errors.CoordinatorError), error))

  threads = [
    threading.Thread(target=run, args=(i,), name=f"optax-dist-embedded-{i}")
    for i in range(num_replicas)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  if failures:
    raise min(failures, key=lambda f: f[0])[1]
  return results


def _place(
  address: str | None, total: int | None, number: int | None
) -> tuple[str, int, int]:
  if address is not None and total is not None and number is not None:
    return address, total, number
  from optax_dist.coordinator import cluster

  return cluster.detect(address, total, number)


def _policy(
  opt: optax.GradientTransformation,
  factory: policies.Factory | None,
  quorum: policies.Quorum,
) -> policies.Policy:
  rules.check_sync_arguments(
    quorum.replicas_to_aggregate,
    quorum.total_num_replicas,
    quorum.max_staleness,
  )
  made = (factory or policies.SyncReplicas)(opt, quorum)
  made.quorum.initial(0)
  return made


def _secret(secret: bytes | str | None, loopback: bool) -> bytes:
  if secret is None:
    secret = os.environ.get(SECRET_VARIABLE, "")
  if not secret and not loopback:
    raise ValueError(
      "A job that listens beyond loopback needs a secret: pass secret= or set "
      f"{SECRET_VARIABLE} to the same random text on all replicas."
    )
  return secret.encode() if isinstance(secret, str) else secret
