"""Loss and throughput of several runs on one picture: `python -m taco_jax.plot RUN... [--out compare.png]`."""

from __future__ import annotations

import sys

from taco_jax.config import cli
from taco_jax.train.plot import main

if __name__ == "__main__":
    sys.exit(cli.run(main))
