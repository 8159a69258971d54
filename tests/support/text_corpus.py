"""Small tokenizers of the usual kinds, text to try them on, and the tokens that a prepared folder must hold."""

import hashlib
import json
import random
from pathlib import Path

import numpy as np

END = "<|end|>"
WORDS = (
    "the of and Ein Zug nach Zürich über größere 山 川 日本語 naïve 1,024 3.5 (see) don't x=y; ‘so’ — 🙂 a_b".split()
)


def sentences(count: int, seed: int = 0) -> str:
    """Text with paragraphs, indentation and runs of spaces."""
    draw = random.Random(seed)
    ends = (". ", ".\n", ".\n\n", "!\n\n    ", "  ")
    return "".join(
        " ".join(draw.choices(WORDS, k=draw.randint(3, 14))).capitalize() + draw.choice(ends) for _ in range(count)
    )


def byte_level():
    """GPT-2's kind."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _train(tokenizer, trainers.BpeTrainer(vocab_size=600, special_tokens=[END], initial_alphabet=alphabet))
    return tokenizer


def llama():
    """Llama 2's kind: BPE over the whole text, marks in the place of spaces and before the text, bytes if need be."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers

    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>", END, *bytes_], limit_alphabet=40)
    # Trained by word, as the vocabularies of such models are; they encode without words.
    _train(tokenizer, trainer)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def unigram():
    """T5's kind."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    _train(tokenizer, trainers.UnigramTrainer(vocab_size=300, special_tokens=[END, "<unk>"], unk_token="<unk>"))
    return tokenizer


def word_piece():
    """BERT's kind."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    _train(tokenizer, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", END], show_progress=False))
    return tokenizer


KINDS = {"byte level": byte_level, "llama": llama, "unigram": unigram, "word piece": word_piece}


def _train(tokenizer, trainer) -> None:
    trainer.show_progress = False
    tokenizer.train_from_iterator(sentences(400, seed=1).splitlines(), trainer)


def tokenizer_folder(folder: Path, kind: str = "byte level") -> Path:
    """A folder with a tokenizer, whose configuration names the end token. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    KINDS[kind]().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": END}}))
    return folder


def held_out(text: str, share: float) -> bool:
    """As docs/data.md has it: the first eight bytes of a document's BLAKE2b hash of 16 bytes, as a share of 2 ** 64."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest()[:8], "little") / 2**64 < share


def expected(tokenizer: Path, documents: list[str], share: float, end: str = END) -> dict[str, list[int]]:
    """The ids of both splits: each document encoded whole, by the library, with the end token behind."""
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    splits: dict[str, list[int]] = {"train": [], "validation": []}
    for text in documents:
        ids = library.encode(text, add_special_tokens=False).ids
        splits["validation" if held_out(text, share) else "train"] += [*ids, library.token_to_id(end)]
    return splits


def stored(folder: Path) -> dict[str, list[int]]:
    """The ids of a prepared folder, after a look at what its meta.json says of each file."""
    meta = json.loads((folder / "meta.json").read_text())
    assert (meta["format"], meta["version"]) == ("taco_jax tokens", 1)
    dtype = {"uint16": "<u2", "uint32": "<u4"}[meta["dtype"]]
    splits = {}
    for split, about in meta["splits"].items():
        ids = []
        for file in about["files"]:
            data = (folder / file["name"]).read_bytes()
            found = np.frombuffer(data, dtype)
            assert hashlib.sha256(data).hexdigest() == file["sha256"] and len(found) == file["tokens"]
            assert (found == meta["end_token"]["id"]).sum() == file["documents"]
            assert found[-1] == meta["end_token"]["id"] and found.max() < meta["vocab_size"]
            ids += found.tolist()
        assert about["tokens"] == len(ids)
        assert about["documents"] == sum(file["documents"] for file in about["files"])
        splits[split] = ids
    return splits


def tree(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, hidden ones too."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
