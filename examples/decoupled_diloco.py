"""Decoupled DiLoCo with Muon inside: four learners, each on a clock of its own.

Handwritten digits, in one process and in virtual time: what learners compute is
real, how long they take is said. One is twice as slow as the others, and another is
lost for a while; nobody waits for either. `optax_dist.decoupled_diloco` says what is
merged when.

    python examples/decoupled_diloco.py

Needs the extra [train]. Options: --steps 300 (of a fast learner) --alpha 0.25.
"""

import argparse
import heapq
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib
from sklearn.datasets import load_digits

from optax_dist import decoupled_diloco as dd

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--alpha", type=float, default=0.25, help="of their own")
args = parser.parse_args()

STEP_SECONDS = {"a": 1.0, "b": 1.0, "c": 1.1, "slow": 2.0}
LOST, BACK = 0.3 * args.steps, 0.5 * args.steps  # For "b", in seconds.
MERGE_SECONDS = 0.5
BATCH = 64
CONFIG = dd.Config(fragments=2, period=12, quorum=2, overlap=2)

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.data))
images = (digits.data[order] / 16).astype(np.float32)
labels = digits.target[order].astype(np.int32)
parts = np.array_split(np.arange(1400), len(STEP_SECONDS))
test = slice(1400, None)

inner = contrib.muon(0.02)
outer = optax.sgd(0.7, momentum=0.9, nesterov=True)


def init():
  """64 pixels, a hidden layer, 10 digits."""
  keys = jax.random.split(jax.random.key(0))
  return {
    "hidden": jax.random.normal(keys[0], (64, 64)) / 8,
    "out": jax.random.normal(keys[1], (64, 10)) / 8,
    "bias": jnp.zeros(10),
  }


def logits(params, images):
  hidden = jax.nn.relu(images @ params["hidden"])
  return hidden @ params["out"] + params["bias"]


def loss(params, images, labels):
  return optax.softmax_cross_entropy_with_integer_labels(
    logits(params, images), labels
  ).mean()


@jax.jit
def local_step(params, state, images, labels):
  updates, state = inner.update(
    jax.grad(loss)(params, images, labels), state, params
  )
  return optax.apply_updates(params, updates), state


class Learner:
  """Trains on its own part of the data, from the common parameters."""

  def __init__(self, name, center, versions, part):
    self.name, self.part = name, part
    self.params, self.state = dict(center), inner.init(center)
    self.versions = list(versions)
    self.since = [0] * CONFIG.fragments  # Steps since it took each one in.
    self.clocks = dd.clocks(CONFIG)  # At a period it is the fragment's turn.
    self.called = set()  # Fragments that others have given.
    self.steps = 0
    self.rng = np.random.default_rng(len(name))

  def step(self):
    at = self.rng.choice(self.part, BATCH)
    self.params, self.state = local_step(
      self.params, self.state, images[at], labels[at]
    )
    self.steps += 1
    self.since = [n + 1 for n in self.since]
    self.clocks = [n + 1 for n in self.clocks]
    due = {i for i, n in enumerate(self.clocks) if n >= CONFIG.period}
    due, self.called = due | self.called, set()
    for fragment in due:
      self.clocks[fragment] = 0
    return sorted(due)

  def contribution(self, fragment):
    steps = self.since[fragment]
    return dd.Contribute(
      self.name,
      fragment,
      self.versions[fragment],
      steps * BATCH,
      steps,
      STEP_SECONDS[self.name],
    )

  def take_in(self, fragment, version, new, merged):
    own = {k: self.params[k] for k in new}
    self.params |= dd.mix(own, new, args.alpha)
    self.versions[fragment], self.since[fragment] = version, 0
    self.called.discard(fragment)
    if not merged:
      self.clocks[fragment] = 0


center = init()
fragment_of = dd.balanced_fragments(center, CONFIG.fragments)
keys_of = [
  [k for k, f in fragment_of.items() if f == i] for i in range(CONFIG.fragments)
]
outer_states = [outer.init({k: center[k] for k in keys}) for keys in keys_of]
rules = dd.init(CONFIG)
learners, given, merging, dropped = {}, {}, {}, 0
number = itertools.count()
events = [(LOST, next(number), "lose", "b"), (BACK, next(number), "join", "b")]
for name in STEP_SECONDS:
  heapq.heappush(events, (0.0, next(number), "join", name))


def at(when, what, of):
  heapq.heappush(events, (when, next(number), what, of))


def tell(event, now):
  """Tells the rules, and does what they say."""
  global rules, dropped
  rules, decisions = dd.step(rules, event, now)
  for decision in decisions:
    match decision:
      case dd.Merge(fragment, attempt, members):
        merging[attempt] = [given[fragment, name] for name, _ in members]
        weights = [weight for _, weight in members]
        names = [name for name, _ in members]
        at(now + MERGE_SECONDS, "merged", (fragment, attempt, weights, names))
      case dd.Call(fragment, names):
        for name in names:
          learners[name].called.add(fragment)
      case dd.Abort(_, attempt):
        del merging[attempt]
      case dd.Drop():
        dropped += 1
  if dd.deadline(rules) is not None:
    at(dd.deadline(rules), "tick", None)


def apply_merge(fragment, weights, theirs):
  """A step of the outer optimizer, on what the members have moved."""
  start = {k: center[k] for k in keys_of[fragment]}
  gaps = [{k: start[k] - own[k] for k in start} for own in theirs]
  updates, outer_states[fragment] = outer.update(
    dd.merge(gaps, weights), outer_states[fragment], start
  )
  center.update(optax.apply_updates(start, updates))


while events and events[0][0] <= args.steps:
  now, _, what, of = heapq.heappop(events)
  if what == "join":
    versions = [r.version for r in rules.rounds]
    part = parts[list(STEP_SECONDS).index(of)]
    learners[of] = Learner(of, center, versions, part)
    tell(dd.Join(of), now)
    at(now + STEP_SECONDS[of], "step", learners[of])
  elif what == "lose":
    print(f"{now:6.1f} s: {of} is lost")
    del learners[of]
    tell(dd.Leave(of), now)
  elif what == "step" and learners.get(of.name) is of:
    for fragment in of.step():
      given[fragment, of.name] = {k: of.params[k] for k in keys_of[fragment]}
      tell(of.contribution(fragment), now)
    at(now + STEP_SECONDS[of.name], "step", of)
  elif what == "merged" and of[1] in merging:
    fragment, attempt, weights, names = of
    apply_merge(fragment, weights, merging.pop(attempt))
    tell(dd.Merged(fragment, attempt), now)
    new = {k: center[k] for k in keys_of[fragment]}
    version = rules.rounds[fragment].version
    for learner in learners.values():
      learner.take_in(fragment, version, new, learner.name in names)
  elif what == "tick":
    tell(dd.Tick(), now)

found = logits(center, images[test]).argmax(-1)
accuracy = float(np.mean(found == labels[test]))
merges = [r.version for r in rules.rounds]
print(f"steps: { ({n: x.steps for n, x in learners.items()}) }")
print(f"merges of each fragment: {merges}; contributions dropped: {dropped}")
print(f"test accuracy of the common parameters: {accuracy:.3f}")
