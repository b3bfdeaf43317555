"""Where the options of `optax-dist launch` end and the program begins."""

import argparse

import pytest

from optax_dist.cli import errors
from optax_dist.cli.launch import program


@pytest.fixture
def parser():
  made = argparse.ArgumentParser()
  made.add_argument("--replicas")
  made.add_argument("--resume", action="store_true")
  return made


@pytest.mark.parametrize(
  ("own", "rest"),
  [
    ("--replicas 2", "x.py --replicas 3"),
    ("--replicas=2 --resume", "x.py"),
    ("--resume", "-m module --resume"),
    ("--replicas 2", "-- x.py -m module"),
    ("--resume --help", ""),
  ],
)
def test_the_parts(parser, own, rest):
  argv = ["launch", *own.split(), *rest.split()]
  assert program.split(parser, argv) == (["launch", *own.split()], rest.split())


def test_other_commands_are_left_alone(parser):
  argv = ["train", "x.py"]
  assert program.split(parser, argv) == (argv, [])


@pytest.mark.parametrize("given", [[], ["--"], ["-m"]])
def test_there_must_be_something(given):
  with pytest.raises(errors.CommandError, match="what shall be launched"):
    program.command(given)
