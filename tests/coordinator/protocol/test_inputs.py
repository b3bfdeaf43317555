"""Inputs: what comes together stays in its order."""

from optax_dist.coordinator.protocol import inputs, messages


def test_gradients_that_follow_one_another_are_one_input():
  arrive = messages.Arrive(0, 0, 1, 1, True, 0, None, b"g", "", None)
  a, b, c = (inputs.Received(peer, arrive) for peer in "abc")
  other = inputs.Received("d", messages.Applied(3))
  lost = inputs.PeerLost("a", "broken", "it has died")
  given = [a, other, a, b, lost, b, c, a]
  together = inputs.together(given)
  assert together == [
    a,
    other,
    inputs.Arrivals((a, b)),
    lost,
    inputs.Arrivals((b, c, a)),
  ]
  assert inputs.together([]) == []
