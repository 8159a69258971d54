"""Text to GPT-2 tokens: train.bin and val.bin (uint16) for the trainer, from a folder of text and GPT-2's merges.

    python experiments/tokenize_corpus.py --corpus CORPUS --merges vocab.bpe --out tokens/

CORPUS holds *.train.txt.xz (documents are separated by empty lines) and val.jsonl.xz ({"text": ...} a line). Documents
are shuffled (seed 0), each after an <|endoftext|>. Needs the package `tokenizers`. The vocabulary follows from the
merges alone: 256 bytes, one token for each merge, <|endoftext|>.
"""

from __future__ import annotations

import json
import lzma
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import runs

from taco_jax.config import ConfigError, cli

END = "<|endoftext|>"


def tokenizer(merges: Path):
    """GPT-2's byte-level BPE from its merges file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pairs = [tuple(line.split()) for line in merges.read_text(encoding="utf-8").splitlines()[1:] if line]
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    vocabulary = {token: i for i, token in enumerate([*letters, *("".join(pair) for pair in pairs), END])}
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    return bpe


def write(bpe, documents: list[str], path: Path) -> int:
    end = bpe.token_to_id(END)
    size = 0
    with path.open("wb") as file:
        for start in range(0, len(documents), 4096):
            encoded = bpe.encode_batch(documents[start : start + 4096], add_special_tokens=False)
            ids = np.concatenate([np.array([end, *e.ids], np.uint16) for e in encoded])
            size += ids.size
            file.write(ids.tobytes())
    return size


def check(corpus: Path, merges: Path):
    """The tokenizer, or a ConfigError where something that is needed is missing."""
    runs.file("--merges", merges, "name GPT-2's merges, often called vocab.bpe or merges.txt")
    runs.require(any(corpus.glob("*.train.txt.xz")), "--corpus", corpus, "must be a folder with *.train.txt.xz files")
    runs.file("--corpus", corpus / "val.jsonl.xz", "the corpus needs validation documents")
    try:
        bpe = tokenizer(merges)
        known = bpe.encode("Hello, world! It's 2024.").ids
    except ImportError:
        raise ConfigError("the package tokenizers is missing: pip install tokenizers") from None
    except Exception as error:  # the Rust side raises bare Exceptions
        raise ConfigError(f"--merges={merges}: is no file of merges ({' '.join(str(error).split())[:200]})") from None
    right = [15496, 11, 995, 0, 632, 338, 48609, 13]
    runs.require(known == right, "--merges", merges, f"are not GPT-2's: a sentence became {known}, not {right}")
    return bpe


def main(arguments: Sequence[str]) -> None:
    parser = cli.Parser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--merges", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(arguments)
    bpe = check(args.corpus, args.merges)
    runs.folder("--out", args.out)
    documents = []
    for path in sorted(args.corpus.glob("*.train.txt.xz")):
        documents += [d for d in lzma.open(path, "rt", encoding="utf-8").read().split("\n\n") if d.strip()]
    order = np.random.default_rng(0).permutation(len(documents))
    train = write(bpe, [documents[i] for i in order], args.out / "train.bin")
    lines = lzma.open(args.corpus / "val.jsonl.xz", "rt", encoding="utf-8")
    validation = write(bpe, [json.loads(line)["text"] for line in lines], args.out / "val.bin")
    sizes = f"{train / 1e6:.1f}M training and {validation / 1e6:.2f}M validation tokens"
    print(f"{args.out}: {len(documents)} documents, {sizes}")


if __name__ == "__main__":
    sys.exit(cli.run(main))
