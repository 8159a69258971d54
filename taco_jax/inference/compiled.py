"""The compiled programs of a model on its mesh: one for prompts of each padded length, one for a decode step.

Both end in the choice of the next token, so that only ids travel to the host. A program is compiled when it is first
asked for, ahead of its first run, so that compiling is no part of the time to first token.

Dims: B batch, L length of the padded prompts, S slots of the cache, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from taco_jax.collectives import comm_log
from taco_jax.compression.chains import compiler_options
from taco_jax.inference import cache as kv
from taco_jax.inference import forward, sampling
from taco_jax.inference.sampling import Rows
from taco_jax.inference.settings import Settings
from taco_jax.models.config import ModelConfig
from taco_jax.models.params import param_specs

SHORTEST = 32


def bucket(length: int, longest: int) -> int:
    """The padded length of a prompt, or the slots of a cache: a power of two, so that few programs are needed."""
    return max(length, min(max(SHORTEST, 1 << (length - 1).bit_length()), longest))


class Programs:
    """`prefill` and `decode` for arrays of any size. compile_seconds: what compiling them took so far."""

    def __init__(self, config: ModelConfig, settings: Settings, mesh: Mesh, params: Any):
        self.config, self.mesh, self.params, self.compile_seconds = config, mesh, params, 0.0
        device = mesh.devices.flat[0]
        self._prefill_layout = settings.layout(config, device, decoding=False)
        self._decode_layout = settings.layout(config, device, decoding=True)
        self._param_specs = param_specs(config, settings.tp)
        self.error_feedback, self.codecs = self._prefill_layout.error_feedback, self._prefill_layout.codecs
        self._compiled: dict[tuple, Any] = {}
        self.tables: dict[tuple, comm_log.Table] = {}
        """The messages of every program, by ("prefill", B, L, S, greedy) and ("decode", B, S, greedy)."""

    def prefill(self, batch: int, length: int, slots: int, *, greedy: bool) -> Callable:
        """(params, tokens int32[B, L], lengths int32[B], rows) -> (next token int32[B], cache).

        Row b's prompt is in its first lengths[b] places.
        """
        config, layout = self.config, self._prefill_layout

        def run(params, tokens_BL, lengths_B, rows):
            logits_BV, cache = forward.prefill(params, tokens_BL, lengths_B, slots, config=config, layout=layout)
            return _next(logits_BV, lengths_B, rows, greedy), cache

        arguments = self._ints(batch, length), self._ints(batch), self._rows(batch)
        specs = (self._param_specs, P(), P(), P()), (P(), kv.specs())
        key = "prefill", batch, length, slots, greedy
        return self._program(key, run, specs, arguments, chains=layout.chains_of(config, batch, length).count)

    def decode(self, batch: int, slots: int, *, greedy: bool) -> Callable:
        """(params, tokens int32[B], positions int32[B], rows, cache) -> (next token, positions + 1, cache).

        The cache that goes in is given away.
        """
        config, layout = self.config, self._decode_layout

        def run(params, tokens_B, positions_B, rows, cache):
            logits_BV, cache = forward.decode(params, tokens_B, positions_B, cache, config=config, layout=layout)
            return _next(logits_BV, positions_B + 1, rows, greedy), positions_B + 1, cache

        heads = max(config.n_kv_heads, self.mesh.shape["tp"])
        shape = (config.n_layers, batch, slots, heads, config.head_dim)
        cache = kv.KVCache(*(self._shape(shape, layout.par.dtype, spec) for spec in kv.specs()))
        arguments = self._ints(batch), self._ints(batch), self._rows(batch), cache
        specs = (self._param_specs, P(), P(), P(), kv.specs()), (P(), P(), kv.specs())
        return self._program(("decode", batch, slots, greedy), run, specs, arguments, donate=(4,))

    def put(self, tree: Any) -> Any:
        """Host arrays on all devices of the mesh."""
        return jax.device_put(tree, NamedSharding(self.mesh, P()))

    def _program(self, key: tuple, run, specs, arguments, donate=(), chains: int = 1) -> Any:
        if key not in self._compiled:
            start = time.perf_counter()
            in_specs, out_specs = specs
            mapped = jax.shard_map(run, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)
            with comm_log.record() as table:
                lowered = jax.jit(mapped, donate_argnums=donate).lower(self.params, *arguments)
            options = compiler_options(chains, self.mesh.devices.flat[0].platform)
            self._compiled[key], self.tables[key] = lowered.compile(compiler_options=options), table
            self.compile_seconds += time.perf_counter() - start
        return self._compiled[key]

    def _shape(self, shape: tuple[int, ...], dtype, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, spec))

    def _ints(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self._shape(shape, jnp.int32, P())

    def _rows(self, batch: int) -> Rows:
        return Rows(*(self._shape((batch,), dtype, P()) for dtype in (jnp.float32, jnp.int32, jnp.float32, jnp.uint32)))


def _next(logits_BV: jax.Array, positions_B: jax.Array, rows: Rows, greedy: bool) -> jax.Array:
    return sampling.greedy(logits_BV) if greedy else sampling.sample(logits_BV, positions_B, rows)
