"""What every engine must do, by all engines."""

import concurrent.futures
import contextlib
import os
import signal
import time

import engine_peers
import pytest

from optax_dist.coordinator import embedded, engine, service

_SIZES = [0, 1, 1000, 5_000_000, 20_000_000]


class _Threads:
  """Peers as threads."""

  processes = False

  def __init__(self):
    self._world = embedded.World()
    self._peers = []

  def peers(self, count):
    new = [
      engine_peers.Peer(self._world.connect(f"p{len(self._peers) + i}"))
      for i in range(count)
    ]
    self._peers += new
    return new

  def kill(self, peer):
    peer.end()

  def end(self):
    for peer in self._peers:
      peer.end()


class _Processes:
  """Peers as processes."""

  processes = True

  def __init__(self, exchange):
    self._exchange = exchange
    self._service = service.start("127.0.0.1:0", 8)
    self._peers = []

  def peers(self, count):
    first = len(self._peers)
    for i in range(first, first + count):
      self._peers.append(
        engine_peers.ProcessPeer(self._service.address, i, self._exchange)
      )
    return [peer.started() for peer in self._peers[first:]]

  def kill(self, peer):
    peer.signal(signal.SIGKILL)

  def end(self):
    for peer in self._peers:
      peer.end()
    self._service.stop()
    assert all(peer.process.returncode is not None for peer in self._peers)


@pytest.fixture(
  scope="module", params=["embedded", "shared_memory", "transfer"]
)
def world(request):
  world = (
    _Threads() if request.param == "embedded" else _Processes(request.param)
  )
  try:
    yield world
  finally:
    world.end()


@pytest.fixture(scope="module")
def pair(world):
  return world.peers(2)


def _settles(peer, expression, value, within=5.0):
  end = time.monotonic() + within
  while peer.aside(expression) != value:
    assert time.monotonic() < end, (expression, peer.aside(expression))
    time.sleep(0.02)


def _empties(world, peer):
  """Nothing is pending. Threads may keep what was recycled; see `recycle`."""
  if world.processes:
    _settles(peer, "exchange.pending()", 0)


def test_messages(pair):
  one, two = pair
  assert one.do("board.put('m/a', b'1')")
  assert not two.do("board.put('m/a', b'2')")
  assert two.do("board.get('m/a', 5.0)") == b"1"
  assert two.do("board.put('m/a', b'3', overwrite=True)")
  assert one.do("board.try_get('m/a')") == b"3"
  assert one.do("board.try_get('m/b')") is None
  assert one.do("board.put('m/b/c', b'')")
  assert one.do("board.put('mm/b', bytes(100_000))")
  found = {"m/a": b"3", "m/b/c": b""}
  assert two.do("board.items('m')") == found
  assert two.do("board.items('nothing')") == {}
  # One who waits gets what is put thereafter.
  waiting = two.begin("(board.get('m/later', 10.0), clock())")
  time.sleep(0.7)  # Longer than one slice of the wait.
  assert one.do("board.put('m/later', b'4')")
  put = one.do("clock()")
  value, got = waiting.result(10.0)
  assert value == b"4"
  assert got - put < 1.0
  one.do("board.delete('m')")
  one.do("board.delete('never/there')")
  assert two.do("board.items('m')") == {}
  assert two.do("board.try_get('m/a')") is None
  assert two.do("len(board.items('mm')['mm/b'])") == 100_000


def test_one_of_several_puts_wins(pair):
  # Of threads, and of processes.
  race = (
    "(lambda t: [x.start() for x in t] + [x.join() for x in t])(["
    "threading.Thread(target=lambda i=i, r=r: kept.setdefault(r, []).append("
    "board.put(f'race/{r}', b'%d' % i))) for i in range(4) for r in range(20)"
    "]) and [sum(kept[r]) for r in range(20)]"
  )
  wins = [p.begin(race) for p in pair]
  totals = zip(*(w.result(30.0) for w in wins), strict=True)
  assert [sum(t) for t in totals] == [1] * 20
  for peer in pair:
    peer.do("kept.clear()")


def test_waits_for_messages_end_in_time(pair):
  one, _ = pair
  for timeout in (0.0, 0.05, 0.8):
    started = time.monotonic()
    with pytest.raises(engine.EngineTimeout, match="never"):
      one.do(f"board.get('never', {timeout})")
    assert timeout <= time.monotonic() - started < timeout + 1.0


@pytest.mark.parametrize("first", ["offer", "fetch"])
def test_arrays(world, pair, first):
  one, two = pair
  start = 100 if first == "offer" else 200
  here, there = one.do("exchange.address"), two.do("exchange.address")
  assert "\n" not in here
  before = two.do("exchange.bytes_in"), one.do("exchange.bytes_out")
  for i, nbytes in enumerate(_SIZES):
    ticket = start + i
    give = (
      f"exchange.offer({ticket}, kept.setdefault({ticket},"
      f" filled({nbytes}, {i})), [{there!r}])"
    )
    take = f"fetched({here!r}, {ticket}, {nbytes}, {i})"
    if first == "offer":
      one.do(give)
      assert two.do(take)
    else:
      taking = two.begin(take)
      time.sleep(0.05)
      one.do(give)
      assert taking.result(20.0)
    if nbytes:
      assert one.do(f"kept[{ticket}].ctypes.data % 64") == 0
    one.do(f"exchange.recycle(kept.pop({ticket}))")
  after = two.do("exchange.bytes_in"), one.do("exchange.bytes_out")
  assert after == (before[0] + sum(_SIZES), before[1] + sum(_SIZES))
  for peer in pair:
    _empties(world, peer)


def test_a_view_for_each_reader(world, pair):
  # Slices of one buffer, both ways at once, and to itself.
  addresses = [peer.do("exchange.address") for peer in pair]
  for me, peer in enumerate(pair):
    peer.do(f"kept.update(b=filled(3000, {me}))")
    for i, there in enumerate(addresses):
      peer.do(
        f"exchange.offer({300 + i}, kept['b'][{1000 * i}:{1000 * i + 1000}],"
        f" [{there!r}])"
      )
  for me, peer in enumerate(pair):
    for other, there in enumerate(addresses):
      expected = engine_peers.pattern(3000, other)[1000 * me :][:1000]
      assert (
        peer.do(
          f"exchange.fetch({there!r}, {300 + me}, 1000, 5.0).array.tobytes()"
        )
        == expected.tobytes()
      )
  for peer in pair:
    peer.do("exchange.recycle(kept.pop('b'))")
    _empties(world, peer)


def test_fetches_end_in_time_and_can_be_repeated(world, pair):
  one, two = pair
  here, there = one.do("exchange.address"), two.do("exchange.address")
  started = time.monotonic()
  with pytest.raises(engine.EngineTimeout):
    two.do(f"fetched({here!r}, 400, 1000, 1, timeout=0.3)")
  assert 0.3 <= time.monotonic() - started < 1.5
  started = time.monotonic()
  with pytest.raises(engine.EngineTimeout):
    two.do(f"exchange.fetch({here!r}, 400, 1000, 9.0, lambda: True)")
  assert time.monotonic() - started < 1.5
  one.do("kept.update(b=filled(1000, 1))")
  one.do(f"exchange.offer(400, kept['b'], [{there!r}])")
  assert two.do(f"fetched({here!r}, 400, 1000, 1)")
  one.do("exchange.recycle(kept.pop('b'))")
  for peer in pair:
    _empties(world, peer)


def test_memory_is_used_again_but_not_at_once(pair):
  one, two = pair
  here, there = one.do("exchange.address"), two.do("exchange.address")
  nbytes = 77_000
  one.do(f"kept.update(b=filled({nbytes}, 1))")
  one.do(f"exchange.offer(500, kept['b'], [{there!r}])")
  assert two.do(
    f"kept.update(f=exchange.fetch({here!r}, 500, {nbytes}, 5.0)) is None"
  )
  two.do("kept['f'].check()")
  one.do("kept.update(p=kept['b'].ctypes.data)")
  one.do("exchange.recycle(kept.pop('b'))")
  same = f"filled({nbytes}, 9).ctypes.data == kept['p']"
  assert not one.do(same)
  for _ in range(2):
    assert not one.do(same)
    one.do(f"exchange.recycle(exchange.buffer({nbytes}))")
  # Either it still holds what was fetched, or it says that it doesn't.
  whole = (
    f"np.array_equal(kept['f'].array, (np.arange({nbytes}) * 7 + 13) % 256)"
  )
  with contextlib.suppress(engine.OfferGone):
    equal = two.do(f"bool({whole})")
    two.do("kept['f'].check()")
    assert equal
  two.do("kept.clear()")
  one.do("kept.clear()")


def test_a_killed_peer_is_noticed(world, pair):
  one, _ = pair
  (gone,) = world.peers(1)
  there, here = gone.do("exchange.address"), one.do("exchange.address")
  gone.do("kept.update(b=filled(1000, 1))")
  gone.do(f"exchange.offer(600, kept['b'], [{here!r}])")
  assert one.do(f"fetched({there!r}, 600, 1000, 1)")
  one.do(f"exchange.watch({there!r}, lambda: lost.append(clock())) and None")
  one.do(
    f"kept.update(end=exchange.watch({there!r}, lambda: lost.append('not')))"
  )
  one.do("kept.pop('end')()")
  never = one.begin(f"fetched({there!r}, 601, 1000, 1, timeout=20.0)")
  time.sleep(0.2)
  assert not never.done()
  killed = time.monotonic()
  world.kill(gone)
  with pytest.raises(engine.PeerLost):
    never.result(5.0)
  assert time.monotonic() - killed < 1.0
  _settles(one, "len(lost)", 1, within=1.0)
  assert one.do("lost[0] != 'not'")
  # One that is gone already is noticed, too.
  started = time.monotonic()
  with pytest.raises(engine.PeerLost):
    one.do(f"fetched({there!r}, 602, 1000, 1, timeout=20.0)")
  one.do(f"exchange.watch({there!r}, lambda: lost.append(1)) and None")
  _settles(one, "len(lost)", 2, within=1.0)
  assert time.monotonic() - started < 1.0
  one.do("lost.clear()")
  _empties(world, one)


def test_a_stopped_peer_keeps_nobody_waiting(world, pair):
  if not world.processes:
    return  # Threads can't be stopped.
  one, two = pair
  here, there = one.do("exchange.address"), two.do("exchange.address")
  one.do(f"kept.update(w=exchange.watch({there!r}, lambda: lost.append(1)))")
  two.signal(signal.SIGSTOP)
  try:
    started = time.monotonic()
    with pytest.raises(engine.EngineTimeout):
      one.do(f"fetched({there!r}, 700, 1000, 1, timeout=0.3)")
    assert time.monotonic() - started < 1.0
    assert one.do("board.put('while/stopped', b'1')")
  finally:
    two.signal(signal.SIGCONT)
  # It goes on, with what was put meanwhile, and so does the fetch.
  assert two.do("board.get('while/stopped', 5.0)") == b"1"
  two.do("kept.update(b=filled(1000, 1))")
  two.do(f"exchange.offer(700, kept['b'], [{here!r}])")
  assert one.do(f"fetched({there!r}, 700, 1000, 1)")
  two.do("exchange.recycle(kept.pop('b'))")
  one.do("kept.pop('w')()")
  assert one.do("lost") == []
  for peer in pair:
    _empties(world, peer)


def test_what_can_not_be_meant_is_refused(world, pair):
  one, two = pair
  if not world.processes:
    return
  there = two.do("exchange.address")
  for bad in ("'text'", "'[1, 2]'", "'[null, 5]'", "'[\"[1,2]\",null]'"):
    with pytest.raises(ValueError, match="Not a"):
      one.do(f"exchange.fetch({bad}, 1, 1, 1.0)")
  with pytest.raises(ValueError, match=r"2\*\*62"):
    one.do(f"exchange.fetch({there!r}, 2**62, 1, 1.0)")
  with pytest.raises(ValueError, match="buffer"):
    one.do(f"exchange.offer(1, np.zeros(8, np.uint8), [{there!r}])")
  with pytest.raises(ValueError, match="only once"):
    one.do("exchange.recycle(np.zeros(8, np.uint8))")
  for key in ("", "/a", "a//b"):
    with pytest.raises(ValueError, match="path"):
      one.do(f"board.put({key!r}, b'')")


def test_close_ends_all_waits(world, pair):
  _, two = pair
  (one,) = world.peers(1)
  there = two.do("exchange.address")
  one.do("kept.update(b=filled(1000, 1))")
  one.do(f"exchange.offer(800, kept['b'], [{there!r}])")
  one.do(f"exchange.watch({there!r}, lambda: None) and None")
  waiting = one.begin("board.get('never', 20.0)")
  pool = concurrent.futures.ThreadPoolExecutor(1)
  fetching = pool.submit(
    one.aside, f"fetched({there!r}, 801, 1000, 1, timeout=20.0)"
  )
  time.sleep(0.3)
  assert not waiting.done()
  assert not fetching.done()
  started = time.monotonic()
  one.aside("engine.close()")
  with pytest.raises(engine.BoardLost):
    waiting.result(5.0)
  with pytest.raises(engine.PeerLost):
    fetching.result(5.0)
  assert time.monotonic() - started < 1.0
  pool.shutdown()
  with pytest.raises(engine.BoardLost):
    one.do("board.put('a', b'')")
  one.do("engine.close()")


def test_nothing_is_left_behind(world):
  if not world.processes:
    return
  (peer,) = world.peers(1)
  peer.do("exchange.buffer(5_000_000).fill(1)")
  assert [f for f in os.listdir("/dev/shm") if "optax" in f] == []
  peer.end()
  assert peer.process.returncode == 0
