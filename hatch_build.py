"""The README of the package: its links lead to the repository."""

import pathlib
import re

from hatchling.metadata.plugin.interface import MetadataHookInterface

REPOSITORY = "https://github.com/optax-dist/optax-dist"
_LINK = re.compile(r"\]\((?!https?://|#)([^)\s]+)\)")


def absolute(text: str) -> str:
  """Makes relative links absolute, those of images to the file itself.

  On a page of a package index, a relative link leads nowhere.
  """

  def address(match: re.Match[str]) -> str:
    path = match[1]
    image = path.endswith(".png")
    return f"]({REPOSITORY}/{'raw' if image else 'blob'}/main/{path})"

  return _LINK.sub(address, text)


class ReadmeHook(MetadataHookInterface):
  """Sets the package's `readme`."""

  def update(self, metadata: dict) -> None:
    """Called by hatchling when it builds."""
    text = pathlib.Path(self.root, "README.md").read_text("utf-8")
    metadata["readme"] = {
      "content-type": "text/markdown",
      "text": absolute(text),
    }
