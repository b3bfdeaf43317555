"""Errors that end the command with one line instead of a traceback."""


class CommandError(Exception):
  """A mistake of the user or a problem of the machine, reported in one line.

  Attributes:
    exit_code: the command's exit code; by default 2, for wrong usage.
  """

  def __init__(self, message: str, exit_code: int = 2):
    super().__init__(" ".join(message.split()))
    self.exit_code = exit_code
