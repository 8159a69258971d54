"""Run another program with compressed collectives: `python -m taco_jax.run --compress tensor=int8h -- -m PACKAGE`."""

from __future__ import annotations

import sys

from taco_jax.dropin.command import run

if __name__ == "__main__":
    sys.exit(run())
