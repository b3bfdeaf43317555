"""``optax-dist train --launch processes``: replicas as separate processes."""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import logging
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from optax_dist.cli import errors, parser, reported
from optax_dist.cli.launch import chaos
from optax_dist.cli.train.processes import plan as process_plan

FILES = ("metrics.jsonl", "training.png", "journal.jsonl")
_DEFAULT_REPLICAS = 4
# The exit code after Ctrl-C, as of a shell.
_CTRL_C = 130


def add_arguments(train: argparse.ArgumentParser) -> None:
  """Adds the flags of --launch."""
  group = train.add_argument_group(
    "options of --launch processes",
    "Each replica is a process of its own on this machine, and the coordinator"
    " is between them: who is killed or stopped does not stop the others. With"
    " sync-replicas, elastic-average, local-sgd, diloco and decoupled-diloco.",
  )
  add = group.add_argument
  add(
    "--launch",
    choices=["processes"],
    help="start a process for each replica (default: one program over all"
    " devices)",
  )
  add(
    "--chaos",
    metavar="FAULTS",
    type=chaos.parse,
    help="inject faults into them: kill:P and stop:P with a probability for"
    " each gradient, slow:REPLICAxFACTOR; such as kill:0.02,stop:0.02,slow:2x5",
  )
  add(
    "--resume",
    action="store_true",
    help="resume from the last checkpoint in --output; without it, an --output"
    " with an earlier run is refused",
  )
  parser.add_number(
    group,
    "--checkpoint-every",
    "N",
    parser.whole_number(0),
    default=50,
    help="steps between checkpoints; 0 for none",
  )
  parser.add_number(
    group,
    "--timeout",
    "SECONDS",
    parser.positive_float,
    default=60.0,
    help="seconds without progress after which the run is given up",
  )


def check(args: argparse.Namespace) -> None:
  """Raises an error if the arguments are invalid; it is fast."""
  from optax_dist.cli.train import digits

  if args.launch is None:
    for name in ("chaos", "resume"):
      if getattr(args, name):
        raise errors.CommandError(f"--{name} needs --launch processes")
    return
  if args.replicas is None:
    args.replicas = _DEFAULT_REPLICAS
    if args.batch_size % args.replicas:
      raise errors.CommandError(
        f"--batch-size {args.batch_size} is not divisible by the"
        f" {args.replicas} replicas; give --replicas"
      )
  chaos.check(args.chaos, args.replicas)
  process_plan.make(args, digits.TRAIN_SIZE)


def run(args: argparse.Namespace, paths: Sequence[pathlib.Path]) -> int:
  """Launches the replicas and trains to the end.

  Args:
    args: the parsed arguments, checked.
    paths: writable paths of `FILES`.
  """
  import numpy as np

  from optax_dist.cli.runs import table as run_table
  from optax_dist.cli.train import digits, metrics, numbers, picture
  from optax_dist.cli.train.processes import checkpoints
  from optax_dist.coordinator.launch import launcher
  from optax_dist.coordinator.launch.environment import Environment

  train, test = digits.load()
  config = process_plan.make(args, len(train.labels))
  checkpoint, began = _checkpoint(args), 0
  if checkpoint is not None:
    began = checkpoints.step_of(checkpoint)
    _check_resumed(config, paths[2])
  if checkpoint is None:
    paths[2].unlink(missing_ok=True)
  needed = min(config["replicas_to_aggregate"], args.replicas)
  with contextlib.ExitStack() as stack:
    stack.enter_context(_errors_only("optax_dist.coordinator"))
    data = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
    np.savez(
      data / "digits.npz",
      images=train.images,
      labels=train.labels,
      test_images=test.images,
      test_labels=test.labels,
    )
    # It may be refused: nothing is overwritten before.
    reporter = stack.enter_context(reported.reporting(args, paths[2]))
    before = _metrics_before(paths[0], checkpoint)
    lines = stack.enter_context(metrics.JsonLines(paths[0]))
    latest = numbers.TrainingNumbers()
    if reporter is not None:
      reporter.add(latest.metrics)
    shown = stack.enter_context(
      run_table.Live(paths[2], config["commits"], from_end=True)
    )
    collected = _Collected(config, lines, before, latest)

    def on_event(replica: int, incarnation: int, event: dict) -> None:
      collected.take(replica, event)

    launched = launcher.Launcher(
      [sys.executable, "-m", "optax_dist.cli.train.processes.replica"],
      args.replicas,
      folder=args.output / "replicas",
      told=Environment(
        journal=str(paths[2]), faults=chaos.dump(args.chaos, args.seed)
      ),
      env=_variables(args, config, data, checkpoint),
      needed=needed,
      restarts=10_000 if args.chaos else args.replicas,
      on_event=on_event,
      on_tick=shown.update,
    )
    try:
      report = launched.run()
    except launcher.LaunchError as error:
      raise errors.CommandError(str(error), exit_code=1) from error
    except (KeyboardInterrupt, SystemExit) as stop:
      code = stop.code if isinstance(stop, SystemExit) else _CTRL_C
      raise errors.CommandError(
        f"interrupted at step {max(began, collected.steps):,};"
        f" {_how_to_go_on(args.output)}",
        exit_code=code if isinstance(code, int) else 1,
      ) from None
    collected.flush()
  return _conclude(args, config, paths, report, collected, picture, began)


def _variables(
  args: argparse.Namespace,
  config: dict[str, Any],
  data: pathlib.Path,
  checkpoint: pathlib.Path | None,
) -> dict[str, str]:
  """The environment variables of the replicas.

  Args:
    args: the parsed arguments.
    config: the run's configuration.
    data: the folder of the images, and of compiled programs.
    checkpoint: the checkpoint to resume from.
  """
  told = {
    "config": config,
    "data": str(data / "digits.npz"),
    "checkpoints": str(args.output / "checkpoints"),
    "checkpoint": checkpoint and str(checkpoint),
    "checkpoint_every": args.checkpoint_every,
    "fingerprint_every": 1,
    "timeout": args.timeout,
    "attempt_timeout": min(5.0, args.timeout),
    "leader_timeout": min(2.0, args.timeout),
  }
  return {
    "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu"),
    "JAX_NUM_CPU_DEVICES": "1",
    # All compile the same program, so later ones can use the cache.
    "JAX_COMPILATION_CACHE_DIR": os.environ.get(
      "JAX_COMPILATION_CACHE_DIR", str(data / "cache")
    ),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    process_plan.VARIABLE: json.dumps(told),
  }


@contextlib.contextmanager
def _errors_only(name: str) -> Iterator[None]:
  """Hides warnings inside the context, for the live table."""
  logger = logging.getLogger(name)
  before = logger.level
  logger.setLevel(logging.ERROR)
  try:
    yield
  finally:
    logger.setLevel(before)


def _checkpoint(args: argparse.Namespace) -> pathlib.Path | None:
  """The checkpoint to resume from; refuses to overwrite another run's."""
  from optax_dist.cli.train.processes import checkpoints

  folder = args.output / "checkpoints"
  if args.resume:
    try:
      found = checkpoints.newest(folder)
    except OSError as error:
      raise errors.CommandError(
        f"--resume: {error.filename} can't be read: {error.strerror}"
      ) from error
    if found is None:
      raise errors.CommandError(f"--resume: there is no checkpoint in {folder}")
    return found
  steps = checkpoints.steps(folder)
  if steps:
    raise errors.CommandError(
      f"--output {args.output} has the checkpoints of an earlier run, up to step"
      f" {steps[-1]:,}; --resume goes on from there, or give another folder"
    )
  if _has_commits(args.output / FILES[2]):
    raise errors.CommandError(
      f"--output {args.output} has the journal of an earlier run; give another"
      " folder"
    )
  return None


def _how_to_go_on(output: pathlib.Path) -> str:
  """What to do after an interrupt."""
  from optax_dist.cli.train.processes import checkpoints

  if checkpoints.steps(output / "checkpoints"):
    return f"--resume goes on from the last checkpoint in {output}"
  return "there is no checkpoint yet to go on from"


def _check_resumed(config: dict[str, Any], path: pathlib.Path) -> None:
  """Compares the flags with those of the run that is resumed, if known.

  Raises:
    errors.CommandError: the checkpoint has the state of another strategy or
      optimizer.
  """
  from optax_dist.coordinator import journal

  found: list[dict[str, Any]] = []
  with contextlib.suppress(OSError):
    found = [r for r in journal.read(path).records if r["kind"] == "run"]
  before = (found[-1]["config"] if found else None) or {}
  if before.get("program") != process_plan.PROGRAM:
    return
  old, new = process_plan.flags(before), process_plan.flags(config)
  changed = {
    f"--{name.replace('_', '-')}": (old.get(name), value)
    for name, value in new.items()
    if old.get(name) != value
  }
  for flag in ("--strategy", "--optimizer", "--fragments"):
    if flag in changed:
      was, now = changed[flag]
      raise errors.CommandError(
        f"--resume: the checkpoint is of a run with {flag} {was}, and its state"
        f" is of no use to {flag} {now}; give {flag} {was}, or start anew in"
        " another --output"
      )
  if changed:
    words = ", ".join(
      f"{flag} {now} (before: {was})" for flag, (was, now) in changed.items()
    )
    parser.say(f"resumes with other flags: {words}")


def _has_commits(path: pathlib.Path) -> bool:
  from optax_dist.coordinator import journal

  try:
    return any(r["kind"] == "commit" for r in journal.read(path).records)
  except FileNotFoundError:
    return False


def _metrics_before(
  path: pathlib.Path, checkpoint: pathlib.Path | None
) -> list[dict[str, Any]]:
  """The metrics of the steps that a checkpoint includes."""
  from optax_dist.cli.train.processes import checkpoints

  if checkpoint is None or not path.exists():
    return []
  last = checkpoints.step_of(checkpoint)
  found = []
  for line in path.read_text().splitlines():
    with contextlib.suppress(ValueError):
      found.append(json.loads(line))
  return [record for record in found if record["step"] <= last]


class _Collected:
  """Collects metrics from the replicas' messages."""

  def __init__(
    self,
    config: dict[str, Any],
    lines: Any,
    before: Sequence[dict[str, Any]],
    latest: Any,
  ):
    self._config, self._lines, self._latest = config, lines, latest
    self._losses: dict[int, list[float]] = collections.defaultdict(list)
    self._accuracies: dict[int, float] = {}
    self._times: dict[int, float] = {}
    self._before = time.monotonic()
    self.records: list[dict[str, Any]] = list(before)
    for record in before:
      lines.write(record)
    self._written = before[-1]["step"] if before else 0
    self.finals: dict[int, dict[str, Any]] = {}
    self._evaluated: set[int] = set()
    self.faults: collections.Counter[str] = collections.Counter()

  @property
  def steps(self) -> int:
    """The last step that was reported."""
    return max(self._losses, default=0)

  def take(self, replica: int, event: dict[str, Any]) -> None:
    """Processes a replica's message."""
    kind = event["event"]
    if kind == "fault":
      self.faults[event["fault"]] += 1
    elif kind == "finished" and "accuracy" in event:
      self.finals[replica] = event
      self._accuracies[event["step"]] = event["accuracy"]
    elif kind == "step":
      step = event["step"]
      if "accuracy" in event and self._epochs(step) not in self._evaluated:
        # A slow replica evaluates an epoch again, at a later step.
        self._evaluated.add(self._epochs(step))
        self._accuracies[step] = event["accuracy"]
      if event["accepted"]:
        self._losses[step].append(event["loss"])
        self._times.setdefault(step, time.monotonic())
        self._write(step - 3)

  def _epochs(self, steps: int) -> int:
    """How many epochs are complete after this many steps."""
    config = self._config
    epochs = config["local_steps"] / config["steps_per_epoch"]
    return int(steps * epochs / config["commits"])

  def flush(self) -> None:
    """Writes the remaining metrics."""
    self._write(self.steps)

  def _write(self, until: int) -> None:
    config = self._config
    for step in sorted(s for s in self._losses if self._written < s <= until):
      losses, now = self._losses[step], self._times[step]
      record = {
        "step": step,
        "epoch": 1 + self._epochs(step - 1),
        "loss": sum(losses) / len(losses),
        "gradients": len(losses),
        "samples_per_second": round(
          len(losses) * config["batch_size"] / max(now - self._before, 1e-6), 1
        ),
      }
      if step in self._accuracies:
        record["test_accuracy"] = self._accuracies[step]
      self._before, self._written = now, step
      self._lines.write(record)
      self._latest.take(record)
      self.records.append(record)


def _conclude(
  args: argparse.Namespace,
  config: dict[str, Any],
  paths: Sequence[pathlib.Path],
  report: Any,
  collected: _Collected,
  picture: Any,
  began: int,
) -> int:
  finals = list(collected.finals.values())
  if not finals:
    raise errors.CommandError("no replica was there at the end", exit_code=1)
  prints = {(f["step"], f["fingerprint"]) for f in finals}
  if len(prints) > 1:
    raise errors.CommandError(
      f"replicas ended with different parameters: {sorted(prints)}", exit_code=1
    )
  title = f"Digits, {args.strategy}, {args.replicas} processes"
  if len(collected.records) > 1:
    picture.save(paths[1], collected.records, title)
  final = finals[0]
  faults = ", ".join(f"{n} x {name}" for name, n in collected.faults.items())
  after = f" after the {began:,} of the checkpoint" if began else ""
  steps, seconds = final["step"] - began, _seconds(paths[2])
  pace = f", {steps / seconds:.1f} steps/s" if steps and seconds else ""
  print(
    f"{args.strategy}, {args.replicas} processes: {steps:,} steps{after} in"
    f" {seconds:.1f} s{pace} ({report.seconds:.1f} s with start and end);"
    f" faults: {faults or 'none'}; {report.restarts} processes restarted"
  )
  print(
    f"{len(finals)} replicas hold the same parameters, fingerprint"
    f" {final['fingerprint']}"
  )
  print(
    f"test accuracy {final['accuracy']:.1%}, metrics in {paths[0]}, journal in"
    f" {paths[2]}, picture in {paths[1]}"
  )
  return 0


def _seconds(path: pathlib.Path) -> float:
  """Duration of the steps by the journal's clock, like all other figures."""
  from optax_dist.coordinator import journal

  parts = journal.segments(journal.read(path).records)
  times = (
    [r["time"] for r in parts[-1] if r["kind"] == "commit"] if parts else []
  )
  return max(times, default=0.0)


__all__ = ["FILES", "add_arguments", "check", "run"]
