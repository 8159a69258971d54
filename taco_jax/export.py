"""A trained run for Hugging Face's transformers: `python -m taco_jax.export RUN[@STEP] --to FOLDER`."""

from __future__ import annotations

import sys

from taco_jax.config import cli
from taco_jax.inference.export import main

if __name__ == "__main__":
    sys.exit(cli.run(main))
