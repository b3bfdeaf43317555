"""Latencies from the command line."""

import pytest

from optax_dist.cli import errors, parser
from optax_dist.cli.simulate import latency_source


def _load(*argv):
  command = parser.Parser()
  latency_source.add_arguments(command)
  latency_source.add_run_arguments(command)
  args = command.parse_args(argv)
  return args, *latency_source.load(args)


def test_what_is_not_given_is_filled_in():
  args, latency, recorded = _load("--latency", "gamma:4,0.25")
  assert (str(latency), recorded) == ("gamma:4,0.25", None)
  assert (args.replicas, args.max_staleness) == (8, 0)
  assert latency_source.communication(args, recorded)(8) == 0.0


def test_what_is_given_is_kept():
  more = ("--replicas", "3", "--max-staleness", "2", "--communication", "0.5")
  args, _, recorded = _load("--latency", "constant:1", *more)
  assert (args.replicas, args.max_staleness) == (3, 2)
  assert latency_source.communication(args, recorded)(2) == 0.5


def test_bytes_and_a_network_make_the_communication():
  given = ("--latency", "constant:1", "--model-bytes", "8e6")
  args, _, recorded = _load(*given, "--network", "0.25,1e6")
  assert latency_source.communication(args, recorded)(4) == 0.5 + 12.0
  with pytest.raises(errors.CommandError, match="goes with --journal"):
    _load(*given, "--more-journals", "run.jsonl")


@pytest.mark.parametrize(
  ("argv", "said"),
  [
    (["--latency", "weibull:1"], "--latency: a latency is one of"),
    (["--journal", "nowhere.jsonl"], "--journal nowhere.jsonl: can't be read"),
  ],
)
def test_where_none_come_from_is_an_error(argv, said):
  with pytest.raises(errors.CommandError, match=said):
    _load(*argv)
