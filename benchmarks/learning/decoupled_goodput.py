"""Goodput under failures: data parallelism against independent learners.

Prints, for 150,000 to 2.4 M chips that each fail once a year, the share of the chips'
time that is training, beside what the paper says, and draws it. Virtual time; a few
seconds.

    python benchmarks/learning/decoupled_goodput.py [--seeds N] [--image FILE]
      [--json FILE]

Douillard et al. 2026, Decoupled DiLoCo (https://arxiv.org/abs/2604.21428), table 1.
"""

import heapq

import matplotlib.pyplot as plt
import numpy as np
import results

SECONDS = 5e5
SLICE = 256
FAILURES_PER_SECOND = 1 / (365.25 * 86400)
# Fitted to the paper's table, see docs/decoupled_diloco.md: an elastic program
# stands still until it goes on without a slice, and when it takes it in again; any
# other one until it has another slice and has started anew.
WITHOUT, AGAIN, ANEW = 13.0, 6.0, 68.0
REPAIR = 3600.0
CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
SYSTEMS = {
  "data parallel": (1, False),
  "elastic data parallel": (1, True),
  "2 learners": (2, True),
  "8 learners": (8, True),
  "16 learners": (16, True),
}
PAPER = {
  ("data parallel", 1_200_000): 27,
  ("data parallel", 2_400_000): 18,
  ("elastic data parallel", 1_200_000): 58,
  ("elastic data parallel", 2_400_000): 40,
  ("2 learners", 1_200_000): 70,
  ("8 learners", 1_200_000): 88,
  ("8 learners", 2_400_000): 80,
  ("16 learners", 1_200_000): 93,
  ("16 learners", 2_400_000): 86,
}


class Learner:
  """A program over some slices, of which now and then one fails.

  Attributes:
    useful: slice-seconds of training so far.
  """

  def __init__(self, slices, elastic):
    self.up, self.elastic = slices, elastic
    self.out, self.returns = set(), []
    self.now = self.stands_until = self.useful = 0.0

  def train(self, until):
    """Trains until then; slices may return meanwhile."""
    while self.returns and self.returns[0][0] <= until:
      at, which = heapq.heappop(self.returns)
      self._pass(at)
      self.up += 1
      self.out.discard(which)
      if self.up > 1:
        self._stand(AGAIN)
    self._pass(until)

  def fail(self, which):
    """A slice fails now."""
    if not self.elastic:
      self._stand(ANEW)
    elif which not in self.out:
      self.out.add(which)
      self.up -= 1
      heapq.heappush(self.returns, (self.now + REPAIR, which))
      if self.up:
        self._stand(WITHOUT)

  def _stand(self, seconds):
    """Stands still; what happens meanwhile is handled in the same pause."""
    if self.now >= self.stands_until:
      self.stands_until = self.now + seconds

  def _pass(self, until):
    begins = min(max(self.now, self.stands_until), until)
    self.useful += self.up * (until - begins)
    self.now = until


def goodput(chips, learners, elastic, seed):
  """The share of the chips' time that is training, in percent."""
  slices = chips // SLICE
  rng = np.random.default_rng(seed)
  rate = slices * SLICE * FAILURES_PER_SECOND
  times = np.sort(rng.uniform(0, SECONDS, rng.poisson(rate * SECONDS)))
  sizes = [len(part) for part in np.array_split(np.arange(slices), learners)]
  programs = [Learner(size, elastic) for size in sizes]
  which = rng.integers(slices, size=times.size)
  learner_of = np.searchsorted(np.cumsum(sizes), which, side="right")
  events = zip(times.tolist(), which.tolist(), learner_of.tolist(), strict=True)
  for at, failed, number in events:
    programs[number].train(at)
    programs[number].fail(failed)
  for program in programs:
    program.train(SECONDS)
  useful = sum(program.useful for program in programs)
  return 100 * useful / (slices * SECONDS)


def measure(name, chips, seeds):
  """Goodput in percent, one for each seed."""
  return [goodput(chips, *SYSTEMS[name], seed) for seed in range(seeds)]


def draw(found):
  """Draws goodput over the number of chips, with the paper's points."""
  figure, ax = plt.subplots(figsize=(6, 3.8), layout="constrained")
  for i, name in enumerate(SYSTEMS):
    means = [np.mean(found[name][chips]) for chips in CHIPS]
    ax.plot(CHIPS, means, color=f"C{i}", label=name)
    points = [(c, value) for (n, c), value in PAPER.items() if n == name]
    ax.plot(*zip(*points, strict=True), "o", color=f"C{i}", mfc="none")
  ax.plot([], [], "o", color="gray", mfc="none", label="the paper's figures")
  ax.set_xscale("log")
  ax.set_xticks(CHIPS, [f"{c / 1e6:g} M" for c in CHIPS], minor=False)
  ax.minorticks_off()
  ax.set(
    xlabel="chips, each of which fails once a year",
    ylabel="goodput (%)",
    ylim=(0, 100),
    title="One program that stands still, or learners apart",
  )
  ax.grid(alpha=0.3)
  ax.legend(fontsize="small")
  return figure


def main():
  """Simulates all, and prints the results next to the paper's figures."""
  parser = results.parser(__doc__)
  parser.add_argument("--seeds", type=int, default=5)
  args = parser.parse_args()
  result = {
    name: {chips: measure(name, chips, args.seeds) for chips in CHIPS}
    for name in SYSTEMS
  }
  print(f"goodput in percent, mean of {args.seeds} seeds (paper; difference)")
  for name, by_chips in result.items():
    for chips, values in by_chips.items():
      line = f"{name:22} {chips:>9,} {np.mean(values):6.1f}"
      if (name, chips) in PAPER:
        paper = PAPER[name, chips]
        line += f"  ({paper}; {np.mean(values) - paper:+.1f})"
      print(line)
  results.save(args, lambda: draw(result), result)


if __name__ == "__main__":
  main()
