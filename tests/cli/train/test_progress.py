"""Progress on a terminal and off it."""

import io

import rich.console

from optax_dist.cli.train import progress


def _record(step, epochs_steps, **more):
  return {
    "step": step,
    "epoch": (step - 1) // epochs_steps + 1,
    "loss": 1 / step,
    "samples_per_second": 1000.0,
  } | more


def _show(epochs, **console):
  text = io.StringIO()
  made = rich.console.Console(file=text, highlight=False, **console)
  with progress.Progress(epochs, 2 * epochs, made) as shown:
    shown.message("compiling")
    for step in range(1, 2 * epochs + 1):
      more = {} if step % 2 else {"test_accuracy": 0.75}
      shown.show(_record(step, 2, **more))
  return text.getvalue()


def test_off_a_terminal_there_are_plain_lines():
  text = _show(epochs=2, force_terminal=False)
  assert text.splitlines() == [
    "compiling",
    "epoch 1/2  loss 0.5000  test 75.0%  1,000 images/s",
    "epoch 2/2  loss 0.2500  test 75.0%  1,000 images/s",
  ]


def test_a_long_run_is_at_most_20_lines_and_the_last_epoch_is_one():
  lines = _show(epochs=333, force_terminal=False).splitlines()
  assert len(lines) <= 22
  assert lines[-1].startswith("epoch 333/333")


def test_a_terminal_has_a_bar_with_loss_and_throughput():
  text = _show(epochs=2, force_terminal=True, width=80, _environ={})
  last = [line for line in text.splitlines() if "epoch 2/2" in line][-1]
  assert "loss 0.2500  test 75.0%  1,000 images/s" in last
  assert "━" in last
