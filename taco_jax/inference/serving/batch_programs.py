"""The compiled programs of a server: `insert` puts one prompt into a row of the batch, `step` decodes all rows.

There is one cache of B rows. Requests come and go row by row, and each row has a position and a way of sampling of its
own, so no program depends on which rows are in use, and a row's tokens depend on nothing but its own request. For that,
sums of steps are exact: compressed, the term that a rank adds unquantised would be another one in another row, and
blocks may span two rows. Prompts are compressed, each by itself. Whoever sets min_bytes has steps compressed too.

Everything is compiled before the first request: `insert` for each padded length of a prompt (powers of two), `step`
once for greedy rows alone and once for any. The same programs with log-probabilities are compiled when a request first
asks for them (`prepare`), while others are decoded.

Dims: B rows of the batch, L length of a padded prompt, S slots of the cache, K alternatives of a token.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from taco_jax.compression.compression import EXACT
from taco_jax.inference import cache as kv
from taco_jax.inference import forward, logprobs
from taco_jax.inference.cache import KVCache
from taco_jax.inference.compiled import Programs, bucket
from taco_jax.inference.logprobs import Scores
from taco_jax.inference.sampling import Rows, Sampling, greedy, sample
from taco_jax.inference.settings import Settings
from taco_jax.models.config import ModelConfig

STATE, CACHE = 1, 2
"""Which arguments of both programs these are."""


class State(NamedTuple):
    """The rows' tokens, the last one chosen of each; positions, where it will stand; rows, how each is sampled."""

    tokens: jax.Array
    positions: jax.Array
    rows: Rows


class Inserted(NamedTuple):
    """Log-probabilities that `insert` gives. token: of the token that follows the prompt, B = 1. prompt: at each of L
    positions, of the prompt's token behind it. None where they were not asked for."""

    token: Scores | None = None
    prompt: Scores | None = None


class RowPrograms(Programs):
    """The programs for a batch of `batch` rows, each a sequence of at most `longest` tokens."""

    def __init__(self, config: ModelConfig, settings: Settings, mesh: Mesh, params: Any, batch: int, longest: int):
        super().__init__(config, settings, mesh, params)
        if settings.options.min_bytes is None:
            exact = dataclasses.replace(settings, compression=EXACT, plan={})
            self._decode_layout = exact.layout(config, mesh.devices.flat[0], decoding=True)
        self.batch, self.longest, self.itemsize = batch, longest, jnp.dtype(settings.dtype).itemsize
        self._dtype = self._decode_layout.par.dtype
        self._preparing = threading.Lock()

    def lengths(self) -> list[int]:
        """Returns the lengths that prompts are padded to."""
        return sorted({bucket(length, self.longest) for length in [*_powers(self.longest), self.longest]})

    def compile(self) -> None:
        for length in self.lengths():
            self.insert(length)
        for all_greedy in (True, False):
            self.step(greedy=all_greedy)

    def prepare(self, length: int, top: int, *, whole: bool, steps: bool) -> None:
        """Compiles what a prompt of `length` tokens needs for `top` alternatives; from any thread but the engine's.

        whole: the prompt's own tokens are scored too. steps: more than one token follows.
        """
        with self._preparing:
            self.insert(bucket(length, self.longest), top=top, whole=whole)
            for all_greedy in (True, False) if steps else ():
                self.step(greedy=all_greedy, top=top)

    def first_token(self) -> int:
        """The token after a prompt of one: NOT_FINITE for a model that can answer nothing."""
        state, cache = self.empty()
        prompt = np.zeros((1, self.lengths()[0]), np.int32), np.array([1, 0], np.int32), Sampling().rows(1)
        state, *_ = self.insert(self.lengths()[0])(self.params, state, cache, *self.put(prompt))
        return int(np.asarray(state.tokens)[0])

    @property
    def cache_bytes(self) -> int:
        """Returns the bytes of one device's part of the cache."""
        return kv.cache_bytes(self.config, self.batch, self.longest, self.mesh.shape["tp"], self.itemsize)

    def empty(self) -> tuple[State, KVCache]:
        """A batch without requests."""
        state = State(*(np.zeros(self.batch, np.int32) for _ in range(2)), Sampling().rows(self.batch))
        shapes = self._cache_shapes()
        zeros = jax.jit(
            lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes),
            out_shardings=jax.tree.map(lambda s: s.sharding, shapes),
        )
        return self.put(state), zeros()

    def insert(self, length: int, *, top: int = 0, whole: bool = False) -> Callable:
        """(params, state, cache, tokens int32[1, L], [length, row] int32[2], rows of one) -> (state, cache, Inserted).

        The prompt's keys and values are put into the row, and the token that follows it is the row's last token. The
        cache that goes in is given away. top: alternatives, 0 for no log-probabilities. whole: the prompt's too.
        """
        config, layout = self.config, self._prefill_layout

        def run(params, state, cache, tokens_1L, where, one):
            lengths_1, row, of_prompt = where[:1], where[1], None
            if whole:
                logits_1V, new, of_prompt = logprobs.scored_prefill(
                    params, tokens_1L, lengths_1, config=config, layout=layout, top=top
                )
            else:
                logits_1V, new = forward.prefill(params, tokens_1L, lengths_1, length, config=config, layout=layout)
            token_1 = sample(logits_1V, lengths_1, one)
            of_token = logprobs.of_tokens(logits_1V, token_1, top) if top else None
            put = lambda rows, value: lax.dynamic_update_slice(rows, value, (row,))
            at = lambda rows, value: lax.dynamic_update_slice(rows, value, (0, row, 0, 0, 0))
            state = State(
                put(state.tokens, token_1), put(state.positions, lengths_1), jax.tree.map(put, state.rows, one)
            )
            return state, jax.tree.map(at, cache, new), Inserted(of_token, of_prompt)

        arguments = self._state_shapes(), self._cache_shapes(), self._ints(1, length), self._ints(2), self._rows(1)
        specs = (self._param_specs, P(), kv.specs(), P(), P(), P()), (P(), kv.specs(), P())
        chains = layout.chains_of(config, 1, length).count
        return self._program(("insert", length, top, whole), run, specs, arguments, donate=(CACHE,), chains=chains)

    def step(self, *, greedy: bool, top: int = 0) -> Callable:
        """(params, state, cache, live bool[B]) -> (state, cache, Scores); rows that are not live stay where they are.

        greedy: all live rows are. The cache that goes in is given away. top: as in `insert`; Scores are None with 0.
        """
        config, layout = self.config, self._decode_layout

        def run(params, state, cache, live_B):
            logits_BV, cache = forward.decode(
                params, state.tokens, state.positions, cache, config=config, layout=layout
            )
            ahead_B = state.positions + 1
            chosen_B = _choose(logits_BV, ahead_B, state.rows, greedy)
            scores = logprobs.of_tokens(logits_BV, chosen_B, top) if top else None
            keep = lambda new, old: jnp.where(live_B, new, old)
            return State(keep(chosen_B, state.tokens), keep(ahead_B, state.positions), state.rows), cache, scores

        arguments = self._state_shapes(), self._cache_shapes(), self._shape((self.batch,), jnp.bool_, P())
        specs = (self._param_specs, P(), kv.specs(), P()), (P(), kv.specs(), P())
        return self._program(("step", greedy, top), run, specs, arguments, donate=(CACHE,))

    def _state_shapes(self) -> State:
        return State(self._ints(self.batch), self._ints(self.batch), self._rows(self.batch))

    def _cache_shapes(self) -> KVCache:
        heads = max(self.config.n_kv_heads, self.mesh.shape["tp"])
        shape = (self.config.n_layers, self.batch, self.longest, heads, self.config.head_dim)
        return KVCache(*(self._shape(shape, self._dtype, spec) for spec in kv.specs()))


def _choose(logits_BV: jax.Array, positions_B: jax.Array, rows: Rows, all_greedy: bool) -> jax.Array:
    return greedy(logits_BV) if all_greedy else sample(logits_BV, positions_B, rows)


def _powers(longest: int) -> list[int]:
    return [1 << i for i in range(longest.bit_length()) if 1 << i <= longest]
