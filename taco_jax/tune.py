"""Measure what pays on this machine's links: `python -m taco_jax.tune [--codecs taco int6h] [--output FILE]`."""

from __future__ import annotations

import sys

from taco_jax.config import cli
from taco_jax.tuning.command import main

if __name__ == "__main__":
    sys.exit(cli.run(main))
