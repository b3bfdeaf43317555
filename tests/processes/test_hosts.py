"""The hosts of tests: that they are apart, and what is between them."""

import json
import subprocess
import sys
import time

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

# Sends all; then, told that nothing is lost any more, an end that comes after them.
_COUNT = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(60)
place = (sys.argv[1], 5000)
for i in range(int(sys.argv[2])):
  s.sendto(b"one", place)
print("sent", flush=True)
sys.stdin.readline()
s.sendto(b"end", place)
came = 0
while s.recv(2048) != b"end":
  came += 1
print(came)
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


def test_a_host_has_its_own_loopback():
  with hosts.Hosts(2) as network, _echo(network, 1) as echo:
    ask = network.python(
      *(0, "-c", _ASK, "127.0.0.1", "1", "0.2"), stdout=subprocess.PIPE
    )
    assert ask.communicate(timeout=60)[0] == b"[]\n"
    echo.kill()


def test_a_delay_is_kept_both_ways():
  with hosts.Hosts(2) as network, _echo(network, 1) as echo:
    network.shape(delay=0.02)
    times = _round_trips(network, 0, 1)
    assert len(times) == 5
    assert times[0] >= 0.04
    network.shape([0], delay=0.1)
    assert _round_trips(network, 0, 1)[0] >= 0.12
    echo.kill()


def test_a_share_of_the_packets_is_lost():
  with hosts.Hosts(2, seed=1) as network, _echo(network, 1) as echo:
    network.shape([0], loss=0.5)
    asks = network.python(
      *(0, "-c", _COUNT, network.address(1), "40"),
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    with asks:
      assert asks.stdout.readline() == "sent\n"
      network.shape([0])
      came, _ = asks.communicate("\n", timeout=90)
    assert 8 <= int(came) <= 32
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


@pytest.mark.parametrize("bridged", [False, True])
def test_a_rate_is_kept(bridged):
  receive = (
    "import socket, sys; s = socket.create_server((sys.argv[1], 5001));"
    "print('ready', flush=True); c, _ = s.accept(); n = 0\n"
    "while n < 2_000_000: n += len(c.recv(1 << 20))\n"
    "c.sendall(b'.')"
  )
  send = (
    "import socket, sys, time; s = socket.create_connection((sys.argv[1], 5001));"
    "start = time.monotonic(); s.sendall(bytes(2_000_000)); s.recv(1);"
    "print(time.monotonic() - start)"
  )
  rate = 40e6
  with hosts.Hosts(2, bridged=bridged, rate=rate * bridged) as network:
    if not bridged:
      network.shape(rate=rate)
    server = network.python(
      *(1, "-c", receive, network.address(1)), stdout=subprocess.PIPE
    )
    with server:
      server.stdout.readline()
      client = network.python(
        *(0, "-c", send, network.address(1)), stdout=subprocess.PIPE
      )
      seconds = float(client.communicate(timeout=60)[0])
  assert seconds >= 0.9 * (2_000_000 - 300_000) * 8 / rate


def test_a_host_may_find_its_own_name_at_127_0_1_1():
  look = "import socket; print(socket.gethostbyname(socket.gethostname()))"
  with hosts.Hosts(1, hostnames=True) as network:
    process = network.python(0, "-c", look, stdout=subprocess.PIPE)
    assert process.communicate(timeout=60)[0] == b"127.0.1.1\n"


def test_closing_ends_what_runs_in_a_host():
  start = time.monotonic()
  network = hosts.Hosts(1)
  process = network.start(0, [sys.executable, "-c", "input()"])
  network.close()
  assert process.poll() is not None
  assert time.monotonic() - start < 100
