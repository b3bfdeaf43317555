"""What ends the command with one line instead of a traceback."""


class CommandError(Exception):
  """A mistake of the caller's or of the machine's, reported in one line.

  Attributes:
    exit_code: what the command exits with: 2, for wrong usage, unless said
      otherwise.
  """

  def __init__(self, message: str, exit_code: int = 2):
    super().__init__(" ".join(message.split()))
    self.exit_code = exit_code


class Interrupted(CommandError):
  """Ctrl-C, after which some results were kept."""

  def __init__(self, message: str):
    super().__init__(message, exit_code=130)
