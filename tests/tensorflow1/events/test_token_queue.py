"""The token queue against two lists, and its end."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tensorflow1 import events as tf
from tests.tensorflow1.events import token_queue

MOVES = st.lists(
  st.tuples(
    st.sampled_from(["enqueue_many", "dequeue", "dequeue", "cancel"]),
    st.integers(0, 4),
  ),
  max_size=30,
)


@given(MOVES)
@settings(max_examples=150)
def test_events_in_any_order_are_as_on_two_lists(moves):
  queue, tokens, waiting = tf.TokenQueue(), [], []
  for i, (kind, number) in enumerate(moves):
    expected = []
    match kind:
      case "enqueue_many":
        given = tuple(range(10 * i, 10 * i + number))
        queue, out = queue.enqueue_many(iter(given))
        tokens += given
      case "dequeue":
        queue, out = queue.dequeue(i)
        waiting.append(i)
      case "cancel":
        id = i - number
        queue, out = queue.cancel(id)
        if id in waiting:
          waiting.remove(id)
          error = token_queue.DEQUEUE_CANCELLED
          expected = [tf.Completed(id, "dequeue", error=error)]
    while tokens and waiting:
      id = waiting.pop(0)
      expected.append(tf.Completed(id, "dequeue", tokens.pop(0)))
    assert list(out) == expected
    assert (queue.size, list(queue.tokens)) == (len(tokens), tokens)
    assert queue.pending == tuple(waiting)


def test_a_closed_queue_drains_and_then_fails():
  queue, _ = tf.TokenQueue(name="q").enqueue_many([4])
  queue, out = queue.close()
  assert out == ()
  queue, (done,) = queue.dequeue("w")
  assert done.value == 4
  queue, (done,) = queue.dequeue("w")
  assert done.error == (
    "OutOfRangeError: FIFOQueue 'q' is closed and has insufficient elements "
    "(requested 1, current size 0)"
  )
  queue, (done,) = queue.enqueue_many([5])
  assert done.error == "CancelledError: FIFOQueue 'q' is closed."


def test_a_queue_that_closes_fails_those_that_wait_in_order():
  queue = tf.TokenQueue()
  for worker in ("b", "a"):
    queue, _ = queue.dequeue(worker)
  queue, out = queue.close()
  assert [done.id for done in out] == ["b", "a"]
  assert all("OutOfRangeError" in done.error for done in out)
  assert queue.pending == ()
  # They are not told a second time.
  assert queue.cancel("a") == (queue, ())
  assert queue.close()[1] == ()


def test_no_tokens_are_no_error_even_of_a_closed_queue():
  queue, _ = tf.TokenQueue().close()
  assert queue.enqueue_many([]) == (queue, ())
