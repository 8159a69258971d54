"""Go on with prompts: `python -m taco_jax.generate --model PATH --prompt TEXT [--tp 4 --compression mxfp4]`."""

from __future__ import annotations

import sys

from taco_jax.config import cli
from taco_jax.inference.generate import main

if __name__ == "__main__":
    sys.exit(cli.run(main))
