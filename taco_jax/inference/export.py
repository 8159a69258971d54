"""The program behind `python -m taco_jax.export`: a run's checkpoint as a Hugging Face folder.

    config.json                          of the family that has the run's model, and keys of the one that it came from
    generation_config.json               as it came, else with the ids that end texts
    tokenizer.json, ...                  as they came; of a model of bytes one that maps bytes
    model.safetensors                    or several, with model.safetensors.index.json

Weights are read parameter by parameter, compared with the checkpoint's digests, and written file by file: the host
holds one parameter (of all layers) and one file. All is written into a folder beside, whose name begins with a dot;
that takes the name that was asked for when it is whole. Until then nothing of that name exists, and the folder beside
has no config.json.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import itertools
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import tyro
from tyro.conf import Positional

from taco_jax.config import ConfigError, cli
from taco_jax.data.prepare.output import to_disk

if TYPE_CHECKING:
    from taco_jax.inference.run_folder import RunFolder

DESCRIPTION = """Write a checkpoint of a training run as a Hugging Face folder, which transformers and others load.

RUN is a run's folder, runs/x, whose latest checkpoint is taken, or runs/x@STEP. It needs no GPU, whatever mesh the run
had. The optimiser's state stays in the run. Of a run of adapters (--lora.rank) it writes these, as PEFT loads them;
--merge writes the whole model."""
DTYPES = ("float32", "bfloat16", "float16")
GIGABYTE = 10**9
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt",
)  # fmt: skip
PARTIAL = ".partial"
"""The end of the name of a folder that is not whole."""


@dataclasses.dataclass(frozen=True)
class ExportConfig:
    """Write a checkpoint of a training run as a Hugging Face folder."""

    run: Annotated[Positional[str], tyro.conf.arg(metavar="RUN[@STEP]")] = ""
    """A run's folder, runs/x, its latest checkpoint, or runs/x@STEP."""
    to: str = ""
    """Folder to write; it must not exist, or be empty."""
    dtype: str | None = None
    """Type of the weights: bfloat16, float32 or float16; None: that of the model training began with, else float32."""
    max_shard_gb: float = 5.0
    """Gigabytes (10^9 bytes) of a file of weights at most, unless a single tensor has more."""
    merge: bool = False
    """Of a run of adapters, write the whole model with them merged in, not the adapters alone."""


def main(args: Sequence[str]) -> int:
    config = cli.parse_flags(ExportConfig(), args, prog="python -m taco_jax.export", description=DESCRIPTION)
    example = "python -m taco_jax.export runs/x --to folder"
    for name, value in (("a run's folder", config.run), ("--to", config.to)):
        if not value:
            raise ConfigError(f"{name}: is needed, for example {example}")
    cli.select_devices("cpu")
    options = {"dtype": config.dtype, "max_shard_gb": config.max_shard_gb, "merge": config.merge}
    folder = export(config.run, config.to, **options, say=cli.say)
    cli.say(f"{folder} is whole")
    return 0


def export(
    run: str | Path,
    to: str | Path,
    *,
    dtype: str | None = None,
    max_shard_gb: float = 5.0,
    merge: bool = False,
    say: Any = lambda text: None,
) -> Path:
    """Writes a checkpoint of a run as a Hugging Face folder, of a run of adapters as PEFT's. Returns its path.

    Args: as the flags of the command. say: takes a line about each file.

    Raises:
      ConfigError: one line: no such checkpoint, a damaged one, a model that no family of Hugging Face's has, weights
        that are not finite in that type, or a folder that cannot be written.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r}: must be one of {', '.join(DTYPES)}")
    if not (max_shard_gb > 0 and math.isfinite(max_shard_gb)):
        raise ConfigError(f"max_shard_gb={max_shard_gb}: must be a number above 0, such as 5")
    target = Path(os.path.realpath(Path(to).expanduser()))
    _check_free(target)
    try:
        import safetensors.numpy  # noqa: F401
    except ImportError:
        raise ConfigError("export: needs safetensors: pip install 'taco-jax[inference]'") from None
    from taco_jax.inference.loading import tokenizer_of
    from taco_jax.inference.run_folder import open_run
    from taco_jax.models.huggingface_config import config_to_hf

    source = open_run(run)
    if merge and source.adapters is None:
        raise ConfigError(f"merge=True: {source} has no adapters to merge (lora.rank is not set); leave it out")
    try:
        described = config_to_hf(source.config, source.source)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None
    if source.adapters is not None and not merge:
        try:
            with _whole_or_nothing(target) as folder:
                _write_adapters(source, folder, np.dtype(_numpy_type(dtype or "float32")), say)
        except OSError as error:
            raise ConfigError(f"--to {to}: cannot be written ({error.strerror or error})") from None
        return target
    written = np.dtype(_numpy_type(dtype or _dtype_of(source.source)))
    ids = _token_ids(source, tokenizer_of(source))
    described |= ids | {"torch_dtype": written.name}
    shards = plan(source, written, int(max_shard_gb * GIGABYTE))
    try:
        with _whole_or_nothing(target) as folder:
            _write_weights(source, folder, shards, written, say)
            say(_write_tokenizer(source, folder))
            generation = source.model_files / "generation_config.json"
            if generation.is_file():
                shutil.copyfile(generation, folder / generation.name)
            else:
                _write_json(folder / generation.name, {key: value for key, value in ids.items() if value is not None})
            _write_json(folder / "config.json", described)  # the last: without it the folder is no model
    except OSError as error:
        raise ConfigError(f"--to {to}: cannot be written ({error.strerror or error})") from None
    return target


def _check_free(target: Path) -> None:
    try:
        if target.is_dir():
            if any(target.iterdir()):
                raise ConfigError(f"--to {target}: is there and not empty; name another folder, or empty this one")
        elif target.exists():
            raise ConfigError(f"--to {target}: is there and no folder; name another one")
    except OSError as error:
        raise ConfigError(f"--to {target}: cannot be used ({error.strerror})") from None


@contextlib.contextmanager
def _whole_or_nothing(target: Path) -> Iterator[Path]:
    """Yields a new folder beside `target`, which gets that name when the block has ended without an error.

    The folder is locked until then. What killed programs left beside the same target, whose locks ended with them, is
    removed.
    """
    parent = target.parent
    parent.mkdir(parents=True, exist_ok=True)
    for left in parent.glob(f".{_escaped(target.name)}.*{PARTIAL}"):
        _remove_left(left)
    folder = Path(tempfile.mkdtemp(PARTIAL, f".{target.name}.", parent))
    lock = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # file systems without locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
        mask = _umask()
        folder.chmod(0o777 & ~mask)
        for file in folder.iterdir():
            file.chmod(0o666 & ~mask)  # some libraries make files for their user alone
            to_disk(file)
        os.fsync(lock)
        try:
            folder.rename(target)  # takes the place of an empty folder too
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise ConfigError(f"--to {target}: something was put there meanwhile; name another folder") from None
        to_disk(parent)
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)  # is gone where all went well


def _remove_left(folder: Path) -> None:
    """Removes a folder that no program holds. One that has just begun is empty still, and stays."""
    try:
        lock = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if any(folder.iterdir()):
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        pass
    finally:
        os.close(lock)


def _escaped(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


class Shard(NamedTuple):
    """One file of weights: its name, and the bytes of its tensors by name."""

    file: str
    tensors: dict[str, int]


def plan(run: RunFolder, dtype: np.dtype, most_bytes: int) -> list[Shard]:
    """Returns the files, each with as many tensors as go into `most_bytes`, in the order of the model's table."""
    from taco_jax.inference.tensors import SINGLE
    from taco_jax.models import huggingface

    groups: list[dict[str, int]] = [{}]
    for target in huggingface.targets(run.config):
        size = math.prod(target.shape([run.shape(path) for path in target.ours])) * dtype.itemsize
        for name in target.names:
            if groups[-1] and sum(groups[-1].values()) + size > most_bytes:
                groups.append({})
            groups[-1][name] = size
    if len(groups) == 1:
        return [Shard(SINGLE, groups[0])]
    names = [f"model-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))]
    return [Shard(*pair) for pair in zip(names, groups)]


def _write_adapters(run: RunFolder, folder: Path, dtype: np.dtype, say: Any) -> None:
    from taco_jax.inference import export_adapters as adapters
    from taco_jax.inference.model_folder import read_object

    arrays, base = (
        adapters.tensors(run, dtype),
        adapters.base_of(read_object(run.model_files / "source.json", needed=False)),
    )
    _save(arrays, folder / adapters.WEIGHTS)
    say(f"{adapters.WEIGHTS}: {len(arrays)} tensors of adapters in {dtype.name}")
    if base is None:
        say("the adapters' model is no Hugging Face folder: give it to peft yourself, or export all with --merge")
    _write_json(folder / adapters.CONFIG, adapters.described(run, base))  # the last: without it there are no adapters


def _save(arrays: Mapping[str, np.ndarray], path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        save_file(dict(arrays), path, metadata={"format": "pt"})  # transformers asks for that key
    except SafetensorError as error:  # of a full disk, for one
        raise OSError(f"{path.name}: {' '.join(str(error).split())}") from None


def _write_weights(run: RunFolder, folder: Path, shards: list[Shard], dtype: np.dtype, say: Any) -> None:
    from taco_jax.inference.tensors import INDEX

    tensors = _tensors(run, dtype)
    for shard in shards:
        arrays = dict(itertools.islice(tensors, len(shard.tensors)))
        _save(arrays, folder / shard.file)
        size = sum(shard.tensors.values())
        amount = f"{size / GIGABYTE:.3g} GB" if size >= GIGABYTE / 10 else f"{size / 1e6:.3g} MB"
        say(f"{shard.file}: {len(arrays)} tensors, {amount} in {dtype.name}")
        del arrays
    if len(shards) > 1:
        total = sum(sum(shard.tensors.values()) for shard in shards)
        index = {name: shard.file for shard in shards for name in shard.tensors}
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))})


def _tensors(run: RunFolder, dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, array) of all of the model's tensors as Hugging Face has them."""
    from taco_jax.inference.tensors import finite, not_finite
    from taco_jax.models import huggingface

    for target in huggingface.targets(run.config):
        leaves = [np.asarray(run.read(path)) for path in target.ours]
        for name, array in zip(target.names, target.arrays(leaves)):
            with np.errstate(over="ignore"):
                cast = np.array(array, dtype, order="C")
            if not finite(cast):
                raise ConfigError(f"{run}: the tensor {name!r} {not_finite(np.asarray(array), dtype)}")
            yield name, cast


def _write_tokenizer(run: RunFolder, folder: Path) -> str:
    """Writes the tokenizer's files. Returns a line about them."""
    copied = [name for name in TOKENIZER_FILES if (run.model_files / name).is_file()]
    for name in copied:
        shutil.copyfile(run.model_files / name, folder / name)
    written = _bytes_tokenizer(run, folder) if "tokenizer.json" not in copied else []
    if "tokenizer.json" in copied + written and "tokenizer_config.json" not in copied:
        # Else transformers would make a tokenizer of the model's family, whose rules are others.
        _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
        written.append("tokenizer_config.json")
    if copied or written:
        return f"tokenizer: {', '.join(copied + written)}{' (ids are bytes)' if 'tokenizer.json' in written else ''}"
    return f"no tokenizer: the run has none in {run.model_files}"


def _bytes_tokenizer(run: RunFolder, folder: Path) -> list[str]:
    from taco_jax.inference.loading import tokenizer_of
    from taco_jax.inference.text import ByteTokenizer

    tokenizer = tokenizer_of(run)
    if not isinstance(tokenizer, ByteTokenizer):
        return []
    try:
        library = tokenizer.library
    except ImportError:
        raise ConfigError("export: a model of bytes needs tokenizers: pip install 'taco-jax[inference]'") from None
    library.save(str(folder / "tokenizer.json"))
    return ["tokenizer.json"]


def _token_ids(run: RunFolder, tokenizer: Any) -> dict[str, Any]:
    """Returns bos_token_id, eos_token_id and pad_token_id, None for none: transformers' defaults are another model's.

    Those of the config.json that the model came with, else of its generation_config.json, else of its tokenizer, else
    of the run's data. A tokenizer may have tokens that the model lacks: transformers loads no model that pads with one.
    """
    from taco_jax.inference.model_folder import read_object
    from taco_jax.inference.templates import special_tokens

    generation = read_object(run.model_files / "generation_config.json", needed=False)
    texts = special_tokens(run.model_files)
    ids = {}
    for name in ("bos_token", "eos_token", "pad_token"):
        key, text = f"{name}_id", texts.get(name)
        of_text = tokenizer.id_of(text) if tokenizer is not None and text is not None else None
        said = (run.source.get(key), generation.get(key), of_text, run.end_token if name == "eos_token" else None)
        fitting = (_in_vocabulary(value, run.config.vocab_size) for value in said)
        ids[key] = next((value for value in fitting if value is not None), None)
    return ids


def _in_vocabulary(said: Any, vocab_size: int) -> Any:
    """Returns an id, or those of a list, that the model has; None for none."""
    fits = lambda token: type(token) is int and 0 <= token < vocab_size
    if isinstance(said, list):
        return [token for token in said if fits(token)] or None
    return said if fits(said) else None


def _dtype_of(source: Mapping[str, Any]) -> str:
    """Returns the type of the files that training started from, float32 where it is none that can be written."""
    said = source.get("dtype", source.get("torch_dtype"))
    return said if said in DTYPES else "float32"


def _numpy_type(name: str) -> Any:
    import ml_dtypes

    return ml_dtypes.bfloat16 if name == "bfloat16" else name


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    from taco_jax.train.workdir import write_text

    write_text(path, json.dumps(content, indent=2) + "\n")
