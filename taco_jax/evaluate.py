"""Measure what a codec does to a model: `python -m taco_jax.evaluate perplexity --model PATH --text FILE [--tp 4]`."""

from __future__ import annotations

import sys

from taco_jax.config import cli
from taco_jax.inference.evaluate import main

if __name__ == "__main__":
    sys.exit(cli.run(main))
