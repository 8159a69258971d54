"""`WORKDIR/base`: the weights that adapters belong to (`taco_jax.models.lora`), stored once, before the first step.

They never change, so checkpoints have the adapters alone, and the digest of the base that these were trained with. The
folder is one of checkpoints with a single one, "0", whose arrays have digests too. It makes a run go on from its own
folder, whatever has become of what it was started from.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from taco_jax.config import CheckpointConfig, TrainConfig
from taco_jax.nn.vocab_parallel import pad_vocab
from taco_jax.pipeline import layout
from taco_jax.train.checkpoint import CheckpointError, Checkpoints
from taco_jax.train.digests import of_params
from taco_jax.train.state_layout import gathered
from taco_jax.train.workdir import BASE, set_aside

DIGEST = "base"
"""The key of `Base.digest` in records of checkpoints."""
STEP = 0
COPY_BACK = "copy the folder back from where the run was, or use another run"
"""What helps where a base is lost or damaged: no other is before it."""


class _Weights(Checkpoints):
    """The folder, as its one checkpoint."""

    def _before(self, step: int) -> str:
        return COPY_BACK


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Stored:
    params: Any


class Base:
    """The way between a state's base and what is stored of it, whose layers are as the model has them.

    shapes: of the latter, with the mesh's shardings.
    """

    def __init__(self, base: Any, chunks: int, mesh: Mesh):
        """base: as ShapeDtypeStructs with shardings, its layers in so many chunks."""
        self._in_chunks, self._chunks = base, chunks
        self.shapes = jax.tree.map(layout.joined(chunks, mesh), base, layout.in_layers(base))

    def pack(self, base: Any) -> Any:
        return self._reshaped(layout.join, base, self.shapes)

    def unpack(self, stored: Any) -> Any:
        return self._reshaped(layout.split, stored, self._in_chunks)

    def _reshaped(self, way, tree: Any, shapes: Any) -> Any:
        if self._chunks == 1:
            return tree

        def reshape(tree):
            return jax.tree.map(way(self._chunks), jax.tree.map(gathered, tree, shapes), layout.in_layers(tree))

        return jax.jit(reshape, out_shardings=jax.tree.map(lambda a: a.sharding, shapes))(tree)

    def keep(self, base: Any, config: TrainConfig) -> int:
        """Stores a state's base, where checkpoints are on. Returns its digest. All processes call it.

        It is for runs without a checkpoint: another base that lies there belongs to none, and is set aside. One that a
        killed run has only begun is removed.

        Raises:
          SaveError: it cannot be written.
        """
        stored, size = self.pack(base), config.model.vocab_size
        digest = digest_of(stored, size)
        if not config.checkpoint.enabled:
            return digest
        folder = Path(config.workdir) / BASE
        another = folder.exists() and _kept_digest(folder) != digest
        _together("seen")  # by all, before the first one moves it
        if another and jax.process_index() == 0:
            if _begun_alone(folder):
                shutil.rmtree(folder, ignore_errors=True)
            else:
                set_aside(folder)
        _together("set aside")
        with Checkpoints(folder, CheckpointConfig(keep=None)) as checkpoints:
            vocabulary = (size, pad_vocab(size, config.mesh.tp))
            checkpoints.save(STEP, _Stored(stored), {DIGEST: digest}, vocabulary=vocabulary)
        return digest

    def read(self, config: TrainConfig, digest: int | None) -> Any:
        """Returns the base of a workdir, on the mesh.

        Args:
          digest: what the checkpoint that the run goes on from says of its base.

        Raises:
          CheckpointError: it is not there, damaged, or not the one of that checkpoint.
        """
        folder, size = Path(config.workdir) / BASE, config.model.vocab_size
        with _Weights(folder, CheckpointConfig(enabled=False)) as checkpoints:
            if STEP not in checkpoints.steps():
                raise CheckpointError(missing(folder))
            found = checkpoints.read_fields(STEP, {"params": self.shapes}, size, "use another --workdir")["params"]
        if digest_of(found, size) != digest:
            raise CheckpointError(other(folder))
        return self.unpack(found)


def _together(what: str) -> None:
    """Waits until all processes are here."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(f"taco_jax base {what}")


def digest_of(params: Any, vocab_size: int) -> int:
    """Returns one number for the values of all parameters, without the vocabulary's padding: the same on every mesh."""
    return zlib.crc32(json.dumps(of_params(params, vocab_size), sort_keys=True).encode())


def missing(folder: Path) -> str:
    return f"{folder}: has no whole weights, to which the run's adapters belong; {COPY_BACK}"


def other(folder: Path) -> str:
    return (
        f"{folder}: holds other weights than those that the checkpoint's adapters were trained with; copy back those "
        f"of the run, or use another run"
    )


def _begun_alone(folder: Path) -> bool:
    """Returns whether all in it is what a killed run has begun to write, which is of no use."""
    return folder.is_dir() and all(re.match(r"\d+\.orbax-checkpoint-tmp", part.name) for part in folder.iterdir())


def _kept_digest(folder: Path) -> int | None:
    """The digest of what lies in the folder; None for what is not whole."""
    try:
        with Checkpoints(folder, CheckpointConfig(enabled=False)) as checkpoints:
            return checkpoints.record(STEP).get(DIGEST) if STEP in checkpoints.steps() else None
    except CheckpointError:
        return None
