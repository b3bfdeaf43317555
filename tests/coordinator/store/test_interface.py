"""Tests of the guarantees of every store."""

import contextlib
import threading

import owners
import pytest
import served
import waiting

from optax_dist.coordinator.store import in_process, interface


class _Clients(contextlib.ExitStack):
  """Makes owners of clients, and closes the clients in the end."""

  def __init__(self, connect):
    super().__init__()
    self._connect, self._count = connect, 0

  def __call__(self):
    name = f"client{self._count}"
    self._count += 1
    made = owners.Owner(lambda wake: self._connect(name, wake))
    self.callback(made.store.close)
    return made


@pytest.fixture(
  params=[
    "in-process",
    "server",
  ]
)
def connect(request):
  """A function that connects one more client to an empty store."""
  if request.param == "in-process":
    store = in_process.InProcessStore()
    made = _Clients(lambda name, wake: store.connect(name))
  else:
    store = served.Served()
    made = _Clients(store.connect)
    made.callback(store.close)
  with made:
    yield made


def test_a_value_is_put_once_and_read_by_all(connect):
  one, two = connect(), connect()
  number = one.begin("put_if_absent", "log/0", b"mine")
  assert one.answer(number) == interface.Done(number)
  number = two.begin("put_if_absent", "log/0", b"yours")
  assert two.answer(number) == interface.Conflict(number, b"mine")
  for each in (one, two):
    assert each.get("log/0") == b"mine"
    assert each.get("log/1") is None


def test_of_concurrent_puts_one_succeeds(connect):
  clients = [connect() for _ in range(6)]
  together = threading.Barrier(len(clients))
  answers = {}

  def put(index):
    together.wait(60.0)
    value = b"from %d" % index
    numbers = [
      clients[index].begin("put_if_absent", f"log/{key}", value)
      for key in range(20)
    ]
    answers[index] = [clients[index].answer(n) for n in numbers]

  threads = [threading.Thread(target=put, args=(i,)) for i in range(6)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(240.0)
  for key in range(20):
    done = [i for i, a in answers.items() if isinstance(a[key], interface.Done)]
    assert len(done) == 1
    others = {a[key].value for i, a in answers.items() if i not in done}
    assert others == {b"from %d" % done[0]}


def test_a_retried_put_does_not_conflict_with_itself(connect):
  one = connect()
  for _ in range(2):
    answer = one.ask("put_if_absent", "log/0", b"mine")
    assert isinstance(answer, interface.Done)


def test_put_replaces_and_delete_makes_room_again(connect):
  one = connect()
  for value in (b"1", b"2"):
    assert isinstance(one.ask("put", "beat", value), interface.Done)
    assert one.get("beat") == value
  assert isinstance(one.ask("delete", ["beat", "other"]), interface.Done)
  assert one.get("beat") is None
  answer = one.ask("put_if_absent", "beat", b"3")
  assert isinstance(answer, interface.Done)


def test_answers_come_in_order_and_once_each(connect):
  one = connect()
  numbers = []
  for key in range(40):
    numbers.append(one.begin("put_if_absent", f"log/{key}", b"%d" % key))
    numbers.append(one.begin("get", f"log/{key}"))
  one.answer(numbers[-1])
  assert [e.request for e in one.events] == numbers
  assert [e.value for e in one.events[1::2]] == [b"%d" % k for k in range(40)]


@pytest.mark.parametrize("key", ["", "/log", "log//1", "log/1/", "a b", "é"])
def test_invalid_keys_are_refused(connect, key):
  one = connect()
  for ask in (
    lambda: one.begin("put_if_absent", key, b""),
    lambda: one.begin("put", key, b""),
    lambda: one.begin("get", key),
    lambda: one.begin("delete", ["log/1", key]),
  ):
    with pytest.raises(ValueError, match="A key is a path such as log/17"):
      ask()


def test_values_have_a_largest_size(connect):
  one = connect()
  value = bytes(interface.MAX_VALUE)
  assert isinstance(one.ask("put", "log/0", value), interface.Done)
  assert one.get("log/0") == value
  with pytest.raises(ValueError, match=r"for 'log/0' has 1,048,577 bytes"):
    one.begin("put", "log/0", value + b"x")
  too_many = [f"log/{key}" for key in range(interface.MAX_KEYS + 1)]
  with pytest.raises(ValueError, match="At most 128 keys"):
    one.begin("delete", too_many)
  assert isinstance(one.ask("delete", too_many[1:]), interface.Done)


def test_a_closed_client_leaves_nothing_behind(connect):
  before = {*threading.enumerate()}
  one, two = connect(), connect()
  assert one.get("log/0") is None
  one.store.close()
  one.store.close()
  two.ask("put", "log/0", b"")
  two.store.close()
  left = lambda: {*threading.enumerate()} - before
  waiting.until(lambda: not left(), left)
