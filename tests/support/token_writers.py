"""Token files as other programs write them, by struct and numpy alone, from the formats' descriptions."""

import hashlib
import json
import struct

import numpy as np

MEGATRON_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def megatron(prefix, sequences, dtype="int32", documents=None, modes=None, pointers=None, content=None):
    """prefix.bin and prefix.idx. documents: the first sequence of each and the end; None: each sequence is one."""
    documents = list(range(len(sequences) + 1)) if documents is None else documents
    item, ids = np.dtype(dtype).itemsize, np.concatenate([*sequences, []]).astype(dtype)
    prefix.with_name(f"{prefix.name}.bin").write_bytes(ids.tobytes() if content is None else content)
    if pointers is None:
        pointers = [item * sum(map(len, sequences[:i])) for i in range(len(sequences))]
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, MEGATRON_CODES[dtype], len(sequences), len(documents))
    index += struct.pack(f"<{len(sequences)}i", *map(len, sequences))
    index += struct.pack(f"<{len(sequences)}q", *pointers) + struct.pack(f"<{len(documents)}q", *documents)
    index += b"" if modes is None else struct.pack(f"<{len(modes)}b", *modes)
    prefix.with_name(f"{prefix.name}.idx").write_bytes(index)
    return prefix.with_name(f"{prefix.name}.bin")


def llmc(path, ids, magic=20240520, version=1, count=None):
    kind = {20240520: "<u2"}.get(magic, "<u4")
    header = struct.pack("<3i", magic, version, len(ids) if count is None else count) + bytes(4 * 253)
    path.write_bytes(header + np.asarray(ids, kind).tobytes())
    return path


def prepared(folder, train, validation=(), *, dtype="uint16", vocab_size=256, end=0, tokenizer="{}", **changes):
    """A prepared folder. train, validation: the ids of each file. changes: of meta.json."""
    folder.mkdir(parents=True, exist_ok=True)
    sha = lambda data: hashlib.sha256(data).hexdigest()
    (folder / "tokenizer.json").write_text(tokenizer)

    def split(name, files):
        rows = []
        for i, ids in enumerate(files):
            ids = np.asarray(ids)
            data, documents = ids.astype(f"<{np.dtype(dtype).str[1:]}").tobytes(), int((ids == end).sum())
            (folder / f"{name}-{i:05}.bin").write_bytes(data)
            rows.append({"name": f"{name}-{i:05}.bin", "tokens": len(ids), "documents": documents, "sha256": sha(data)})
        total = lambda key: sum(row[key] for row in rows)
        return {"tokens": total("tokens"), "documents": total("documents"), "files": rows}

    meta = {
        "format": "taco_jax tokens", "version": 1, "dtype": dtype, "vocab_size": vocab_size,
        "end_token": {"text": "<|end|>", "id": end}, "sources": [],
        "tokenizer": {"file": "tokenizer.json", "sha256": sha(tokenizer.encode())},
        "splits": {"train": split("train", train), "validation": split("validation", validation)},
    }  # fmt: skip
    (folder / "meta.json").write_text(json.dumps(meta | changes))
    return folder
