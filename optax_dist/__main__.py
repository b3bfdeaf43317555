"""``python -m optax_dist`` is the ``optax-dist`` command."""

import sys

from optax_dist.cli import main

if __name__ == "__main__":
  sys.exit(main.main())
