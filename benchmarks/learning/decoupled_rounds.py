"""Decoupled DiLoCo in virtual time: the loss against synchronous DiLoCo, over seeds.

Four learners of the character model in one process. What they compute is real and how
long it takes is said, so that figures do not depend on the machine. Compared are
learners of one speed, one that is twice as slow, and that with learners that are lost
at random (20 s apart in the mean) and are back after 2 s, each against synchronous
DiLoCo of as many tokens.

    python benchmarks/learning/decoupled_rounds.py [--seeds 5] [--seconds 24]
      [--max-staleness 0]
"""

import argparse
import pathlib
import random
import sys

import diloco_characters as characters
import jax
import numpy as np
import optax
import results

from optax_dist.coordinator import strategies
from optax_dist.coordinator.extras.decoupled_diloco import (
  strategy as decoupled_diloco,
)

sys.path.append(
  str(pathlib.Path(__file__).parents[2] / "tests" / "helpers" / "transforms")
)
import virtual_learners

LEARNERS, STEP_SECONDS = 4, 0.03
CASES = {
  "of one speed": (1.0, False),
  "one twice as slow": (2.0, False),
  "and lost at random": (2.0, True),
}


class Data:
  """The text, dealt out to learners, and what they draw of it."""

  def __init__(self, seed):
    text, held_out, symbols = characters.load_text()
    self.params = characters.init(jax.random.key(seed), symbols)
    self._own = np.array_split(text, LEARNERS)
    self._random = [np.random.default_rng([seed, i]) for i in range(LEARNERS)]
    self._ahead = np.arange(characters.CONTEXT + 1)
    size = held_out.size - characters.CONTEXT - 1
    starts = np.random.default_rng(0).integers(0, size, characters.EVALUATED)
    self._held_out = held_out[starts[:, None] + self._ahead]
    self._gradient = jax.jit(jax.grad(characters.loss))

  def gradient(self, number, params):
    own = self._own[number]
    size = own.size - characters.CONTEXT - 1
    at = self._random[number].integers(0, size, characters.BATCH)
    return self._gradient(params, own[at[:, None] + self._ahead])

  def loss(self, params):
    return float(characters.loss(params, self._held_out))


def outer():
  return optax.sgd(0.7, momentum=0.9, nesterov=True)


def decoupled(args, seed, slow, lost):
  """The loss, the steps of all, and merges of a fragment in a period."""
  data = Data(seed)
  make = decoupled_diloco.decoupled_diloco(
    outer(),
    fragments=args.fragments,
    period=args.period,
    overlap=args.overlap,
    max_staleness=args.max_staleness,
    merge=args.merge,
  )
  run = virtual_learners.VirtualLearners(
    make(
      optax.adam(characters.LEARNING_RATE),
      strategies.Quorum(args.quorum, LEARNERS),
    ),
    data.params,
    data.gradient,
    [STEP_SECONDS] * (LEARNERS - 1) + [slow * STEP_SECONDS],
    tokens=characters.BATCH,
    seed=seed,
  )
  steps = 0
  if lost:
    chance = random.Random(seed)
    wait = lambda: chance.expovariate(1 / args.lost_every)
    while (at := run.now + wait()) < args.seconds:
      run.run(at)
      number = chance.randrange(LEARNERS)
      steps += run.learners[number].steps
      run.lose(number)
      run.run(min(at + args.back, args.seconds))
      run.join(number)
  run.run(args.seconds)
  steps += sum(learner.steps for learner in run.learners)
  periods = args.seconds / STEP_SECONDS / args.period
  merges = len(run.merges) / args.fragments / periods
  return data.loss(run.center), steps, merges


def synchronous(args, seed, steps):
  """The loss of synchronous DiLoCo after this many steps of all."""
  data = Data(seed)
  strategy = strategies.local_updates(
    outer(), communication_period=args.period
  )(optax.adam(characters.LEARNING_RATE), strategies.Quorum(LEARNERS, LEARNERS))
  shared = strategy.shared(data.params)
  learners = [strategy.local(shared)] * LEARNERS
  for _ in range(steps // LEARNERS):
    inputs = []
    for i, local in enumerate(learners):
      grads = data.gradient(i, strategy.params(shared, local))
      payload, learners[i] = strategy.contribute(shared, local, grads)
      inputs.append(payload)
    if inputs[0] is not None:
      mean = jax.tree.map(lambda *x: sum(x) / LEARNERS, *inputs)
      before, shared = shared, strategy.apply(shared, mean)
      learners = [strategy.settle(before, shared, x, True) for x in learners]
  return data.loss(shared.params)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  add("--seeds", type=int, default=5)
  add("--seconds", type=float, default=24.0, help="of virtual time")
  add("--period", type=int, default=40)
  add("--fragments", type=int, default=4)
  add("--quorum", type=int, default=2)
  add("--overlap", type=int, default=4)
  add("--max-staleness", type=int, default=1)
  add("--merge", choices=["radial", "mean"], default="radial")
  add("--lost-every", type=float, default=20.0, help="seconds, on average")
  add("--back", type=float, default=2.0, help="seconds until it is back")
  add("--cases", nargs="+", default=list(CASES), choices=list(CASES))
  args = parser.parse_args()
  for name in args.cases:
    result = []
    for seed in range(args.seeds):
      loss, steps, merges = decoupled(args, seed, *CASES[name])
      result.append((loss, synchronous(args, seed, steps), merges))
    losses, others, merges = np.array(result).T
    ratios = 100 * (losses / others - 1)
    mean, half = results.interval(ratios)
    print(
      f"{name:20} loss {losses.mean():.4f}, synchronous {others.mean():.4f}:"
      f" {mean:+.1f} % ± {half:.1f}, worst {ratios.max():+.1f} %;"
      f" {merges.mean():.2f} merges of a fragment in a period",
      flush=True,
    )
  return 0


if __name__ == "__main__":
  sys.exit(main())
