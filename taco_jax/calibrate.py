"""Find out which codec each site needs: `python -m taco_jax.calibrate --config FILE --bits 4.5 --out plan.json`."""

from __future__ import annotations

import sys

from taco_jax.calibration.command import main
from taco_jax.config import cli

if __name__ == "__main__":
    sys.exit(cli.run(main))
