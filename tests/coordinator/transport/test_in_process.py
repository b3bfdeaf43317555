"""Transports of threads; the rest is in test_interface."""

import threading

from optax_dist.coordinator.transport import in_process, interface


def test_a_killed_peer_is_lost_without_a_goodbye():
  hub = in_process.Hub()
  a = in_process.InProcessTransport("a", hub)
  b = in_process.InProcessTransport("b", hub)
  a.connect("b", b.address)
  assert [type(e).__name__ for e in a.poll(0)] == ["PeerUp"]
  a.expect("b", 1, 10)
  b.kill()
  failed, lost = a.poll(0)
  assert failed.transfer == 1
  assert lost.how == "broken"
  a.close()


def test_threads_own_a_transport_each():
  hub = in_process.Hub()
  count, names = 200, [f"t{i}" for i in range(4)]
  got = dict.fromkeys(names, 0)
  made = {n: in_process.InProcessTransport(n, hub) for n in names}
  everyone = threading.Barrier(len(names))

  def run(name):
    own = made[name]
    others = [n for n in names if n != name]
    for other in others:
      own.connect(other, made[other].address)
    for i in range(count):
      for other in others:
        own.send(other, [b"%d" % i])
    while got[name] < count * len(others):
      for event in own.poll(5):
        got[name] += isinstance(event, interface.Message)
    everyone.wait(60)
    own.close()

  threads = [threading.Thread(target=run, args=(n,)) for n in names]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(90)
  assert set(got.values()) == {3 * count}
  assert not hub.members
  assert not hub.links
