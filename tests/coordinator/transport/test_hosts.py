"""Two hosts, as network namespaces that this test makes and removes."""

import os
import subprocess
import sys
import uuid

import pytest

_CODE = """
import subprocess, sys, time
from optax_dist.coordinator.transport import interface, sockets
name, own, other, link, space = sys.argv[1:]
limits = interface.Limits(silence=60, connect=60)
t = sockets.SocketTransport(
  name, secret=bytes(16), bind="0.0.0.0", towards=other, limits=limits
)
assert t.address.startswith(f"{own}:{sockets.DEFAULT_PORTS[0]},unix:")
# The name of a socket of another host leads nowhere, and TCP is taken.
t.connect("b" if name == "a" else "a", f"unix:gone,{other}:29400")

def next_message(timeout):
  until = time.monotonic() + timeout
  while time.monotonic() < until:
    for event in t.poll(until - time.monotonic()):
      assert not isinstance(event, interface.PeerLost), event
      if isinstance(event, interface.PeerUp):
        assert not event.near
      if isinstance(event, interface.Message):
        return time.monotonic()
  raise TimeoutError

if name == "b":
  while True:
    next_message(120)
    t.send("a", [b"back"])
for cut in (0, 3):
  t.send("b", [b"x"])
  next_message(90)
  if cut:
    ip = ["ip", "netns", "exec", space, "ip", "link", "set", link]
    subprocess.run([*ip, "down"], check=True)
    t.send("b", [b"x"])
    begun = time.monotonic()
    while time.monotonic() - begun < cut:
      assert not t.poll(0.1)
    subprocess.run([*ip, "up"], check=True)
    healed = time.monotonic()
    print(next_message(90) - healed)
"""


pytestmark = pytest.mark.namespaces


def _run(*command):
  return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture
def hosts():
  """Two namespaces with a link between them: their names, and the links'."""
  tag = uuid.uuid4().hex[:6]
  spaces, links = [f"ox{tag}a", f"ox{tag}b"], [f"v{tag}a", f"v{tag}b"]
  try:
    made = [_run("ip", "netns", "add", space) for space in spaces]
    made.append(
      _run(
        *f"ip link add {links[0]} netns {spaces[0]} type veth".split(),
        *f"peer name {links[1]} netns {spaces[1]}".split(),
      )
    )
    assert not any(m.returncode for m in made), made
    for i in (0, 1):
      inside = ["ip", "-n", spaces[i]]
      _run(*inside, *f"addr add 10.77.0.{i + 1}/24 dev {links[i]}".split())
      for link in ("lo", links[i]):
        _run(*inside, "link", "set", link, "up")
    yield spaces, links
  finally:
    for space in spaces:
      _run("ip", "netns", "del", space)


@pytest.mark.nightly  # tests/coordinator/runs has a cut in a whole run.
def test_a_cut_of_three_seconds_is_over_soon_after_it_has_healed(hosts):
  spaces, links = hosts
  running = []
  for i, name in enumerate("ab"):
    command = [sys.executable, "-c", _CODE, name, f"10.77.0.{i + 1}"]
    command += [f"10.77.0.{2 - i}", links[1], spaces[1]]
    running.append(
      subprocess.Popen(
        ["ip", "netns", "exec", spaces[i], *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ},
      )
    )
  try:
    output, error = running[0].communicate(timeout=240)
  finally:
    for process in running:
      process.kill()
    for process in running:
      process.communicate()
  assert running[0].returncode == 0, error
  # Long before it would be taken for lost; on a busy machine not at once.
  assert float(output) < 30
