"""The products, the attention and the memory traffic of one device, from a model's shape.

A list of `Work`: nothing is timed here. `site` is the site of the message that goes with it ("layers/mlp/up"), "head",
"embed" or "optimizer"; `stage` is forward, again (recomputed), dx (gradients of activations) or dw (of weights).

What is counted is what `taco_jax.models` asks XLA for: one product for q, k, v and one for gate and up, whose kernels
are joined while they are cast; the recomputation of remat without the products whose result a message has brought; a
head in chunks, computed once. Bytes of memory are reads and writes of whole arrays; what XLA fuses counts once.

Letters: T tokens, D model, Q and K widths of a rank's queries and keys, F its mlp width, V its vocabulary.
"""

from __future__ import annotations

import dataclasses
import math

from taco_jax.models.config import ModelConfig
from taco_jax.nn.vocab_parallel import CHUNK, pad_vocab

F32 = 4


@dataclasses.dataclass(frozen=True)
class Work:
    """A product [m, k] @ [k, n], `count` times; or flops of attention; or bytes of memory traffic."""

    site: str
    stage: str
    kind: str
    count: float = 1
    m: int = 0
    n: int = 0
    k: int = 0
    flops: float = 0.0
    bytes: float = 0.0


@dataclasses.dataclass(frozen=True)
class Shard:
    """The widths that one rank of tp has of a model."""

    model: ModelConfig
    tp: int

    @property
    def d(self) -> int:
        return self.model.d_model

    @property
    def q(self) -> int:
        return self.model.n_heads * self.model.head_dim // self.tp

    @property
    def kv(self) -> int:
        """One of k and v: a whole head where there are fewer heads than ranks."""
        return max(1, self.model.n_kv_heads // self.tp) * self.model.head_dim

    @property
    def held_kv(self) -> int:
        """That of its weights: all heads where they are replicated."""
        shared = self.model.n_kv_heads % self.tp
        return (self.model.n_kv_heads if shared else self.model.n_kv_heads // self.tp) * self.model.head_dim

    @property
    def f(self) -> int:
        return self.model.d_mlp // self.tp

    @property
    def up(self) -> int:
        """Columns of the first product of the mlp."""
        return self.f * (2 if self.model.gated_mlp else 1)

    @property
    def v(self) -> int:
        return pad_vocab(self.model.vocab_size, self.tp) // self.tp

    @property
    def layer_weights(self) -> int:
        return self.d * (self.q + 2 * self.held_kv) + self.q * self.d + self.d * self.up + self.f * self.d

    @property
    def joined_weights(self) -> int:
        return self.d * (self.q + 2 * self.kv) + self.d * self.up

    @property
    def table(self) -> int:
        """Weights of the embedding, or of the head."""
        return self.v * self.d

    @property
    def end_weights(self) -> int:
        positions = self.model.max_length * self.d if self.model.positions == "learned" else 0
        return self.table * (1 if self.model.tied_head else 2) + positions

    def parameters(self, layers: int) -> int:
        """Returns those of one rank that has so many layers, and both ends of the model."""
        return layers * (self.layer_weights + 2 * self.d) + self.end_weights


QKV, OUT, UP, DOWN = "layers/attn/qkv", "layers/attn/out", "layers/mlp/up", "layers/mlp/down"


def layer_forward(s: Shard, sequences: int, length: int, stage: str = "forward", *, fused_attention: bool = True,
                  size: int = 2, sp: int = 1, sums: bool = True) -> list[Work]:  # fmt: skip
    """One layer's forward pass; stage="again": its recomputation.

    size: bytes of a value. sp: ranks over which the residual stream is cut. sums: its two last products are computed
    (a recomputation has their sums).
    """
    t = sequences * length
    rows = t / sp
    product = lambda site, n, k: Work(site, stage, "product", m=t, n=n, k=k)
    memory = lambda site, values: Work(site, stage, "memory", bytes=size * values)
    # XLA ends a kernel with a reduction, and what follows reads again. Residual sum and mean square: reads x and what
    # comes, writes x (a recomputation reads x); then the norm: reads x, writes its own.
    of_norm = (5 if sums else 3) * rows * s.d
    work = [
        memory(QKV, of_norm), product(QKV, s.q + 2 * s.kv, s.d),
        memory(QKV, 2 * t * (s.q + 2 * s.kv)),  # cut apart, rotated, with its bias
        *attention(s, sequences, length, stage, fused=fused_attention),
        memory(UP, of_norm), product(UP, s.up, s.d), memory(UP, t * (s.up + s.f)),
    ]  # fmt: skip
    if s.model.qk_norm:
        work.append(memory(QKV, 2 * t * (s.q + s.kv)))
    return work + ([product(OUT, s.d, s.q), product(DOWN, s.d, s.f)] if sums else [])


def attention(s: Shard, sequences: int, length: int, stage: str, *, fused: bool, tile: int = 128) -> list[Work]:
    """Causal attention. fused: by cuDNN, half of the pairs and the diagonal's tiles; else all pairs' scores in float32,
    which are written and read for the scores, the mask, the softmax and its product."""
    backward = stage == "dx"
    heads, pairs = s.q // s.model.head_dim, float(length) * length
    if fused:
        pairs = length * (length + min(tile, length)) / 2
        flops = (5 if backward else 2) * 2 * pairs * s.model.head_dim * heads * sequences
        return [Work(QKV, stage, "attention", flops=flops)]
    flops = (4 if backward else 2) * 2 * pairs * s.model.head_dim * heads * sequences
    passes = 10 if backward else 6
    return [
        Work(QKV, stage, "attention", flops=flops),
        Work(QKV, stage, "memory", bytes=passes * F32 * pairs * heads * sequences),
    ]


def layer_backward(s: Shard, sequences: int, length: int, *, fused_attention: bool = True, size: int = 2,
                   sp: int = 1) -> list[Work]:  # fmt: skip
    """One layer's gradients; what is recomputed is not here."""
    t = sequences * length
    rows = t / sp
    dx = lambda site, n, k: Work(site, "dx", "product", m=t, n=n, k=k)
    dw = lambda site, m, n: Work(site, "dw", "product", m=m, n=n, k=t)
    memory = lambda site, values, stage="dx": Work(site, stage, "memory", bytes=size * values)
    # A norm's gradient: a reduction reads x and the gradient, another kernel these and the stream's, and writes one;
    # that of its scale reads two once more.
    of_norm = 8 * rows * s.d
    # Gradients of gate and up: two kernels that move 3 and 4 widths; both are joined for each of the two products that
    # take them. (loop_multiply_fusion, loop_add_fusion and two wrapped_concatenate a layer in
    # experiments/results/overlap_2gpus/trace.txt.)
    of_act = t * (7 * s.f + 8 * s.f) if s.model.gated_mlp else t * 3 * s.f
    bias = t * (s.q + 2 * s.kv) if s.model.qkv_bias else 0
    return [
        dx(DOWN, s.f, s.d), dw(DOWN, s.f, s.d), memory(DOWN, of_act),
        dx(UP, s.d, s.up), dw(UP, s.d, s.up), memory(UP, of_norm),
        dx(OUT, s.q, s.d), dw(OUT, s.q, s.d),
        *attention(s, sequences, length, "dx", fused=fused_attention),
        memory(QKV, 4 * t * (s.q + 2 * s.kv)), memory(QKV, bias),  # rotated back, joined
        dx(QKV, s.d, s.q + 2 * s.kv), dw(QKV, s.d, s.q + 2 * s.kv), memory(QKV, of_norm),
    ]  # fmt: skip


def layer_weights(s: Shard, passes: int, size: int = 2) -> list[Work]:
    """Casts of a layer's float32 weights for each pass, and its gradients written where all layers' are."""
    cast = passes * (F32 + size) * s.layer_weights
    # The joined kernels' gradients are cut apart: read and written once more.
    apart = 2 * F32 * s.joined_weights
    return [Work(UP, "forward", "memory", bytes=cast), Work(UP, "dw", "memory", bytes=apart)]


def head_loss(s: Shard, tokens: int, chunk: int | None = None, size: int = 2) -> list[Work]:
    """Head, loss and their gradients, in chunks."""
    chunks = math.ceil(tokens / (chunk or CHUNK))
    c = math.ceil(tokens / chunks)
    logits = float(c) * s.v
    product = lambda stage, m, n, k: Work("head", stage, "product", chunks, m=m, n=n, k=k)
    return [
        product("forward", c, s.v, s.d), product("dx", c, s.d, s.v), product("dw", s.d, s.v, c),
        # Two reductions read the float32 logits, one pass more reads them and writes their gradients.
        Work("head", "forward", "memory", chunks, bytes=logits * (3 * F32 + size)),
        # Cast once; the float32 gradient is added up chunk by chunk.
        Work("head", "dw", "memory", bytes=s.table * (F32 + size + 2 * F32 * chunks)),
    ]  # fmt: skip


def embed(s: Shard, tokens: int, size: int = 2, *, gradients: bool = True) -> list[Work]:
    """Rows looked up; their gradients scattered into zeros."""
    forward = [Work("embed", "forward", "memory", bytes=2 * size * tokens * s.d)]
    dw = [Work("embed", "dw", "memory", bytes=F32 * s.table + (size + 2 * F32) * tokens * s.d)]
    return forward + (dw if gradients else [])


def optimizer(parameters: float, shares: int = 1) -> list[Work]:
    """AdamW on float32: reads gradient, weight and both moments, writes three; the norm reads the gradient once more.

    shares: ranks over which ZeRO-1 cuts it.
    """
    return [Work("optimizer", "forward", "memory", bytes=parameters / shares * F32 * (7 + 1))]


def accumulate(parameters: float, times: int) -> list[Work]:
    """Gradients of `times` microbatches added up: two read, one written."""
    return [Work("optimizer", "dw", "memory", bytes=3 * F32 * parameters * times)] if times > 1 else []
