"""`python -m taco_jax.train --config experiments/quickstart.py`."""

import sys

from taco_jax.config import cli
from taco_jax.train.loop import main

if __name__ == "__main__":
    sys.exit(cli.run(main))
