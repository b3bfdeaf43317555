r"""The coordinator's figures, each beside what it is compared with, in turns.

    python benchmarks/comparison/compare.py --figure tensorflow \
        --tensorflow-python .venv-tensorflow/bin/python
    python benchmarks/comparison/compare.py --figure torchft \
        --torchft-python .venv-torchft/bin/python
    python benchmarks/comparison/compare.py --figure straggler
    python benchmarks/comparison/compare.py --figure closed-form
    python benchmarks/comparison/compare.py --figure bytes
    python benchmarks/comparison/compare.py --figure leased-data
    python benchmarks/comparison/compare.py --figure round-trips
    python benchmarks/comparison/compare.py --figure gigabit
    python benchmarks/comparison/compare.py --figure psum
    python benchmarks/comparison/compare.py --figure gloo \
        --torchft-python .venv-torchft/bin/python

README.md says how the environments are made, and what the figures mean.
"""

import argparse
import dataclasses
import json
import pathlib
import sys

import against_tensorflow
import against_torchft
import between_hosts
import bytes_moved
import closed_form
import leased_data
import processes
import side_by_side
import straggler

FIGURES = {
  "tensorflow": against_tensorflow.lines,
  "torchft": against_torchft.lines,
  "straggler": straggler.lines,
  "closed-form": closed_form.lines,
  "bytes": bytes_moved.lines,
  "leased-data": leased_data.lines,
  "round-trips": between_hosts.round_trips,
  "gloo": between_hosts.against_gloo,
  "psum": between_hosts.against_psum,
  "gigabit": between_hosts.gigabit,
}


def main() -> int:
  """Measures, prints a table, and tells whether all goals are met."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  add("--figure", choices=FIGURES, action="append", required=True)
  add("--tensorflow-python", default=".venv-tensorflow/bin/python")
  add("--torchft-python", default=".venv-torchft/bin/python")
  add("--repeats", type=int, default=5, help="rounds, each in turns")
  add("--seconds", type=float, default=6.0, help="of one run, where not steps")
  add("--steps", type=int, help="of one run, where replicas sleep")
  add("--mean", type=float, default=0.1, help="of closed-form, in seconds")
  add("--rows", nargs="+", help="of closed-form: words of the rows' names")
  add("--params", type=int, action="append", help="may be repeated")
  add("--wire", action="append", help="may be repeated")
  add("--json", type=pathlib.Path, metavar="FILE", help="also write them here")
  args = parser.parse_args()
  args.wire = args.wire or ["float32", "bfloat16"]
  processes.launch(apart=False)
  results = {"machine": side_by_side.machine(), "figures": {}}
  missed = 0
  for figure in args.figure:
    print(f"{figure}\n{side_by_side.HEADER}", flush=True)
    kept = results["figures"].setdefault(figure, [])
    for line in FIGURES[figure](args):
      print(line.text(), flush=True)
      missed += line.met is False
      kept.append({**dataclasses.asdict(line), "met": line.met})
      if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
  return 1 if missed else 0


if __name__ == "__main__":
  sys.exit(main())
