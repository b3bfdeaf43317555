"""The hosts of tests: that they are apart, and what is between them."""

import json
import subprocess

import hosts
import pytest

pytestmark = pytest.mark.namespaces

_ECHO = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
s = socket.socket(family, socket.SOCK_DGRAM)
s.bind((sys.argv[1], 5000))
print("ready", flush=True)
while True:
  data, sender = s.recvfrom(2048)
  s.sendto(data, sender)
"""
_ASK = """
import json, socket, sys, time
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
s = socket.socket(family, socket.SOCK_DGRAM)
s.settimeout(float(sys.argv[3]))
times = []
for i in range(int(sys.argv[2])):
  start = time.monotonic()
  s.sendto(str(i).encode(), (sys.argv[1], 5000))
  try:
    while s.recv(2048) != str(i).encode():
      pass
    times.append(time.monotonic() - start)
  except TimeoutError:
    pass
print(json.dumps(sorted(times)))
"""


def _echo(network, host, version=4):
  process = network.python(
    host, "-c", _ECHO, network.address(host, version), stdout=subprocess.PIPE
  )
  assert process.stdout.readline() == b"ready\n"
  return process


def _round_trips(network, host, to, times=5, timeout=10.0, version=4):
  command = ["-c", _ASK, network.address(to, version), str(times), str(timeout)]
  process = network.python(host, *command, stdout=subprocess.PIPE)
  out, _ = process.communicate(timeout=60)
  return json.loads(out)


@pytest.mark.parametrize("bridged", [False, True])
@pytest.mark.parametrize("version", [4, 6])
def test_hosts_reach_each_other(bridged, version):
  with (
    hosts.Hosts(2, bridged=bridged) as network,
    _echo(network, 1, version) as echo,
  ):
    assert len(_round_trips(network, 0, 1, version=version)) == 5
    echo.kill()
  left = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
  assert not [name for name in network.names if name in left]


def test_a_delay_is_kept_both_ways():
  with hosts.Hosts(2) as network, _echo(network, 1) as echo:
    network.shape(delay=0.02)
    times = _round_trips(network, 0, 1)
    assert len(times) == 5
    assert times[0] >= 0.04
    network.shape([0], delay=0.1)
    assert _round_trips(network, 0, 1)[0] >= 0.12
    echo.kill()


def test_cuts_are_one_way_or_both_and_heal():
  with hosts.Hosts(3) as network, _echo(network, 1) as echo:
    network.cut([1], [0], both=False)
    before = network.packets()
    assert not _round_trips(network, 0, 1, times=2, timeout=0.1)
    assert network.packets() > before  # The questions came through.
    assert len(_round_trips(network, 2, 1)) == 5
    network.heal()
    assert len(_round_trips(network, 0, 1)) == 5
    network.vanish(1)
    assert not _round_trips(network, 2, 1, times=2, timeout=0.1)
    echo.kill()
