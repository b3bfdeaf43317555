"""The page "From an empty machine to two hosts", command by command."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import compiling
import hosts as host_maker
import pytest
from waiting import until

from optax_dist.coordinator import journal

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_PAGE = (_ROOT / "docs" / "first_launch.md").read_text("utf-8")
_BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NAMES = (
  *("install", "first", "second", "kill", "watch", "resume"),
  *("groups", "kill in a group"),
  *("secret", "host 0", "host 1"),
)
_COMMANDS = dict(zip(_NAMES, _BLOCK.findall(_PAGE), strict=True))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
  """A clone of the repository, in which the page's install has been run."""
  folder = tmp_path_factory.mktemp("clone")
  for path in _ROOT.iterdir():
    if path.name in ("optax_dist", "examples") or path.suffix in (
      ".md",
      ".py",
      ".toml",
    ):
      (folder / path.name).symlink_to(path)
  (folder / "LICENSE").symlink_to(_ROOT / "LICENSE")
  (folder / "bin").mkdir()
  (folder / "bin" / "python3").symlink_to(sys.executable)
  done = _run("install", folder)
  assert done.returncode == 0, done.stderr
  return folder


def _environment(folder):
  """As on the machine of a user, where pip has fetched all that is needed."""
  named = [x for x in os.environ if x.startswith("OPTAX_DIST_")]
  here = {k: v for k, v in os.environ.items() if k not in named}
  # The packages are this environment's; so is what builds the wheel.
  packages = next(p for p in sys.path if p.endswith("site-packages"))
  return (
    here
    | compiling.as_here()
    | {
      "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
      "PYTHONPATH": packages,
      "PIP_NO_INDEX": "1",
      "PIP_NO_BUILD_ISOLATION": "false",  # pip's way to write --no-...
      "PIP_DISABLE_PIP_VERSION_CHECK": "1",
      "JAX_PLATFORMS": "cpu",
      # As the page advises.
      "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }
  )


def _run(name, folder):
  return subprocess.run(
    ["sh", "-e", "-c", _COMMANDS[name]],
    cwd=folder,
    env=_environment(folder),
    capture_output=True,
    text=True,
    timeout=600,
  )


class _Terminal:
  """A command that runs on, and what it has printed."""

  def __init__(self, folder, log, start, *command):
    self._log = log
    with log.open("wb") as out:
      self.process = start(
        command,
        cwd=folder,
        env=_environment(folder),
        stdout=out,
        stderr=subprocess.STDOUT,
      )

  def wait_for(self, pattern, count=1, seconds=300.0):
    end = time.monotonic() + seconds
    while len(result := re.findall(pattern, self.text)) < count:
      assert time.monotonic() < end, self.text
      assert self.process.poll() is None, self.text
      time.sleep(0.05)
    return result

  @property
  def text(self):
    return self._log.read_text()


def _begin(name, folder, log, start=subprocess.Popen, **replaced):
  command = _COMMANDS[name]
  for old, new in replaced.items():
    command = command.replace(old, new)
  return _Terminal(folder, log, start, "sh", "-e", "-c", f"exec {command}")


def _last_step(path):
  """How many steps the journal has."""
  records = journal.read(path).records
  return max(r["step"] + 1 for r in records if r["kind"] == "commit")


# The next test launches the same program, and tests/examples has one that ends.
@pytest.mark.nightly
def test_commands_for_one_machine_work(place):
  done = _run("first", place)
  assert done.returncode == 0, done.stderr
  # Two are enough for all steps; one that comes after them is ended.
  ended = re.findall(r"\[replica \d\] step 300, loss ([\d.]+)", done.stdout)
  assert len(ended) >= 2
  # Before the first step it is 0.36 or more, whatever the batch. Two took the
  # last step; one that is late prints the loss of an earlier one.
  assert sorted(map(float, ended))[1] < 0.1
  assert {p.name for p in (place / "runs/first").iterdir()} == {
    *("checkpoints", "journal.jsonl", "replicas", "coordinator.log"),
  }


def test_launched_job_survives_a_kill_and_resumes_after_a_stop(place):
  joins = r"\[replica (\d)\] process \d+ joins at step (\d+)"
  one = _begin("second", place, place / "second.log")
  try:
    one.wait_for(joins, 3)
    path = place / "runs/second/journal.jsonl"
    until(lambda: path.exists() and '"commit"' in path.read_text())
    done = _run("kill", place)
    assert done.returncode == 0, done.stderr
    replica, step = one.wait_for(joins, 4)[3]
    assert replica == "1"
    assert int(step) > 0
    done = _run("watch", place)
    assert done.returncode == 0, done.stderr
    assert "accepted" in done.stdout
    while not list((place / "runs/second/checkpoints").glob("step-*")):
      assert one.process.poll() is None, one.text
      time.sleep(0.05)
    one.process.send_signal(signal.SIGINT)
    assert one.process.wait(120.0) == 130, one.text
    assert "Traceback" not in one.text
    # Each has left gracefully, after a step.
    ended = dict(re.findall(r"\[replica (\d)\] step (\d+), loss", one.text))
    assert sorted(ended) == ["0", "1", "2"]
    assert int(ended["1"]) >= int(step)
  finally:
    one.process.kill()
    one.process.wait()
  saved = sorted((place / "runs/second/checkpoints").glob("step-*"))
  at = [int(path.name.removeprefix("step-")) for path in saved]
  # The step at which it stopped is saved, and no more than three are kept.
  assert at[-1] == max(map(int, ended.values())) == _last_step(path)
  assert len(at) <= 3
  one = _begin("resume", place, place / "resume.log")
  try:
    steps = [int(step) for _, step in one.wait_for(joins, 3)]
    assert min(steps) == at[-1]
    one.process.send_signal(signal.SIGTERM)
    assert one.process.wait(120.0) == 143, one.text
  finally:
    one.process.kill()
    one.process.wait()
  assert len(journal.segments(journal.read(path).records)) == 2


@pytest.mark.nightly  # tests/coordinator/runs/test_groups.py has such a kill.
def test_replica_of_two_processes_survives_a_kill(place):
  joins = r"\[replica (\d\.\d)\] process \d+ joins at step (\d+)"
  steps = r"\[replica (\d)\.0\] step (\d+), loss ([\d.]+), of (\d)"
  # A smaller model than on the page.
  small = "--width 16 --layers 1 --context 16 --save-every 20"
  one = _begin(
    "groups",
    place,
    place / "groups.log",
    **{"--steps 1000000": f"--steps 1000000 {small}"},
  )
  try:
    began = one.wait_for(joins, 4)
    assert sorted(who for who, _ in began) == ["0.0", "0.1", "1.0", "1.1"]
    one.wait_for(steps, 2)
    done = _run("kill in a group", place)
    assert done.returncode == 0, done.stderr
    # Both of its processes are there again, at a later step.
    again = one.wait_for(joins, 6)[4:]
    assert sorted(who for who, _ in again) == ["1.0", "1.1"]
    assert len({step for _, step in again}) == 1
    back = int(again[0][1])
    assert back > 0
    together = lambda: [
      s for s in re.findall(steps, one.text) if s[3] == "2" and int(s[1]) > back
    ]
    both = lambda: {who for who, *_ in together()} == {"0", "1"}
    until(both, lambda: one.text, 300.0)
    result = re.findall(steps, one.text)
    # The other one went on alone meanwhile.
    path = place / "runs/groups/journal.jsonl"
    alone = [
      record["step"]
      for record in journal.read(path).records
      if record["kind"] == "commit"
      and [member["replica"] for member in record["members"]] == [0]
    ]
    assert [s for s in alone if max(int(at) for _, at in began) < s <= back]
    # It has learned something (4.56 is nothing).
    assert float(result[-1][2]) < 4.3
    # The last few are kept, of which the first was of step 20.
    kept = (place / "runs/groups/checkpoints").glob("step-*")
    assert max(int(path.name.removeprefix("step-")) for path in kept) >= 20
    one.process.send_signal(signal.SIGINT)
    assert one.process.wait(120.0) == 130, one.text
  finally:
    one.process.kill()
    one.process.wait()


@pytest.mark.nightly  # tests/cli/launch launches between hosts.
@pytest.mark.namespaces
def test_commands_for_two_machines_work(place):
  done = _run("secret", place)
  assert done.returncode == 0, done.stderr
  assert (place / "secret").stat().st_mode & 0o777 == 0o600
  with host_maker.Hosts(2) as hosts:
    both = []
    for host in (0, 1):
      start = lambda command, host=host, **options: hosts.start(
        host, command, **options
      )
      both.append(
        _begin(
          f"host {host}",
          place,
          place / f"host-{host}.log",
          start,
          host0=hosts.address(0),
          # Each machine has its own disk.
          **{"runs/two": f"runs/two-{host}"},
        )
      )
    for host, one in enumerate(both):
      assert one.process.wait(300.0) == 0, one.text
      assert re.findall(r"\[replica (\d)\] step 300, loss", one.text) == [
        str(host)
      ]
