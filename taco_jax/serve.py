"""OpenAI's API over HTTP: `python -m taco_jax.serve --model PATH [--tp 4 --compression mxfp4]`."""

from __future__ import annotations

import sys

from taco_jax.config import cli
from taco_jax.inference.serve import main

if __name__ == "__main__":
    sys.exit(cli.run(main))
