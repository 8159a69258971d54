"""Make token files of text: `python -m taco_jax.prepare --out data/mine --tokenizer tokenizer.json book.txt notes/`."""

from __future__ import annotations

import sys

from taco_jax.config import cli
from taco_jax.data.prepare.command import main

if __name__ == "__main__":
    sys.exit(cli.run(main))
