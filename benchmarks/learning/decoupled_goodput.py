"""Goodput under failures: data parallelism against independent learners.

Prints, for 150,000 to 2.4 M chips that each fail once a year, the share of the chips'
time that is training, beside what the paper says, and draws it. Virtual time; a few
seconds.

    python benchmarks/learning/decoupled_goodput.py [--seeds N] [--image FILE]
      [--json FILE]

Douillard et al. 2026, Decoupled DiLoCo (https://arxiv.org/abs/2604.21428), table 1.
"""

import matplotlib.pyplot as plt
import numpy as np
import results

from optax_dist.simulate import scale

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


def measure(name, chips, seeds):
  """Goodput in percent, one for each seed."""
  learners, elastic = SYSTEMS[name]
  return [
    100
    * scale.simulate_learners(
      scale.paper_fleet(chips, spare=not elastic),
      learners,
      elastic=elastic,
      seconds=5e5,
      seed=seed,
    ).outcome.goodput
    for seed in range(seeds)
  ]


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
  found = {
    name: {chips: measure(name, chips, args.seeds) for chips in CHIPS}
    for name in SYSTEMS
  }
  print(f"goodput in percent, mean of {args.seeds} seeds (paper; difference)")
  for name, by_chips in found.items():
    for chips, values in by_chips.items():
      line = f"{name:22} {chips:>9,} {np.mean(values):6.1f}"
      if (name, chips) in PAPER:
        paper = PAPER[name, chips]
        line += f"  ({paper}; {np.mean(values) - paper:+.1f})"
      print(line)
  results.save(args, lambda: draw(found), found)


if __name__ == "__main__":
  main()
