"""Forecast what compression will gain: `python -m taco_jax.advise --config FILE --gpu H200 --link host`."""

from __future__ import annotations

import sys

from taco_jax.config import cli
from taco_jax.forecast.command import main

if __name__ == "__main__":
    sys.exit(cli.run(main))
