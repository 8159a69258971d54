"""The products, the attention and the memory traffic of one device, from a model's shape.

A list of `Work`: nothing is timed here. `site` is the site of the message that goes with it ("layers/mlp/up"), "head",
"embed" or "optimizer"; `stage` is forward, again (recomputed), dx (gradients of activations) or dw (of weights).

What is counted is what `taco_jax.models` asks XLA for: one product for q, k, v and one for gate and up, whose kernels
are joined while they are cast; the recomputation of remat without the products whose result a message has brought; a
head in chunks, computed once. Bytes of memory are reads and writes of whole arrays; what XLA fuses counts once. How
often an array is read and written, and in how many kernels, was counted in XLA's optimised programs for Hopper: the
tables below, one number for each kind of array. `tests/aot/test_traffic.py` counts again.

Letters: T tokens, D model, Q and K widths of a rank's queries and keys, F its mlp width, V its vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from taco_jax.models.config import ModelConfig
from taco_jax.nn.vocab_parallel import CHUNK, pad_vocab

F32 = 4


@dataclasses.dataclass(frozen=True)
class Work:
    """A product [m, k] @ [k, n], `count` times; or attention; or bytes of memory traffic.

    kind: product, attention, memory, sum, over an array's first dim, zeros, which are written, or gelu. out: bytes of a
    product's values. flops, pairs: of attention, pairs being those of a query and a key. values: of an activation.
    kernels: that move the bytes. beside: the direction of whose messages it is independent, so that XLA puts it beside
    them.
    """

    site: str
    stage: str
    kind: str
    count: float = 1
    m: int = 0
    n: int = 0
    k: int = 0
    out: int = 2
    flops: float = 0.0
    pairs: float = 0.0
    values: float = 0.0
    bytes: float = 0.0
    kernels: float = 1.0
    beside: str = ""


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
    def cut_weights(self) -> int:
        """Weights of a layer's matrices that no other rank of tp holds too."""
        shared = self.model.n_kv_heads % self.tp != 0
        return self.layer_weights - (2 * self.d * self.held_kv if shared else 0)

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


@dataclasses.dataclass(frozen=True)
class Passes:
    """How often one layer reads and writes arrays in a pass, 1 being a read or a write of an array in bfloat16.

    stream: [T, D], cut over sequence parallelism. qkv: [T, Q + 2K]. heads: [T, Q]. mlp: [T, F]. up: what the mlp's
    first product makes. kernels: that do so, small ones too.
    """

    stream: float
    qkv: float
    mlp: float
    heads: float = 0.0
    up: float = 0.0
    kernels: float = 0.0

    def plus(self, other: Passes) -> Passes:
        return Passes(*(getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(Passes)))

    def bytes(self, s: Shard, tokens: int, size: int, sp: int) -> dict[str, float]:
        """Bytes of arrays of the attention's width, and of others, of which half goes with each of the two norms."""
        return {
            QKV: size * tokens * (self.qkv * (s.q + 2 * s.kv) + self.heads * s.q + self.stream * s.d / sp / 2),
            UP: size * tokens * (self.mlp * s.f + self.up * s.up + self.stream * s.d / sp / 2),
        }


# The first norm 2; residual sum and norm 3; residual sum 4, and a copy of it 2. Without gradients there is no copy, and
# products add one of the sums.
INFERENCE = Passes(8, 2, 0, kernels=19)
FORWARD = Passes(11, 2, 0, kernels=17)
# What gradients need goes into an array of all layers, by copies: of the stream twice; with remat=dots of products too.
KEEPS = {"full": Passes(4, 0, 0, kernels=4), "dots": Passes(4, 2, 0, up=2, kernels=8)}
# Without remat autodiff keeps what it will: normalised values in float32, and some of them twice.
KEPT = {
    "layernorm": Passes(49, 4, 2, heads=4, kernels=51),
    "rmsnorm": Passes(33, 4, 2, heads=6, kernels=51),
}
AGAIN = {"layernorm": Passes(8, 2, 0, kernels=8), "rmsnorm": Passes(9, 2, 0, kernels=10)}
# Gradients, without those of the mlp's activation, by remat or none; sums over all tokens are `sums`.
# Those of q, k and v are written into the array that both products take.
BACKWARD = {
    "layernorm": {False: Passes(16, 2, 0, kernels=34), True: Passes(28, 2, 2, heads=10, kernels=48)},
    "rmsnorm": {False: Passes(12, 2, 0, kernels=29), True: Passes(24, 2, 2, heads=10, kernels=46)},
}
ROTATED_BACK = 2
# The mlp's activation by pass. Gradients of gate and up: one kernel, which writes both into the array that two products
# take.
MLP = {
    True: {"forward": 3, "again": 3, "dx": 5, "kept": 7, "dx of kept": 5},
    False: {"forward": 2, "again": 2, "dx": 5, "kept": 4, "dx of kept": 3},
}
GELU = {"forward": 2, "again": 2, "kept": 2}  # of the mlp's forward passes in MLP, the activation's own
# Arrays of all layers, and of all ticks in stages, are zeroed before. With accumulation they are copied from zeros in
# each microbatch.
COPIED = 2
ZEROS = {"full": Passes(2, 0, 0), "dots": Passes(2, 1, 0, up=1), "none": Passes(14, 1, 1, heads=2, up=1)}
# Of the kernels of further chains XLA joins so many with the first one's.
JOINED_KERNELS = 0.5
# Sequence parallelism turns what it gathers and scatters, of both directions.
TURNED = 8


def layer_forward(s: Shard, sequences: int, length: int, stage: str = "forward", *, remat: str = "inference",
                  fused_attention: bool = True, size: int = 2, sp: int = 1, sums: bool = True,
                  before: int = 0) -> list[Work]:  # fmt: skip
    """One layer's forward pass; stage="again": its recomputation.

    remat: what it keeps, none, dots or full, or inference. size: bytes of a value. sp: ranks over which the residual
    stream is cut. sums: its two last products are computed (a recomputation has their sums). before: tokens of the same
    sequences in chains before this one.
    """
    t = sequences * length
    kept = remat == "none" and stage == "forward"
    if stage == "again":
        passes = AGAIN[s.model.norm]
    elif remat == "inference":
        passes = INFERENCE
    else:
        passes = KEPT[s.model.norm] if kept else FORWARD.plus(KEEPS[remat])
    activation = "kept" if kept else stage
    mlp = MLP[s.model.gated_mlp][activation]
    gelu = 0 if s.model.gated_mlp else GELU[activation]
    passes = passes.plus(Passes(0, 0, mlp - gelu))
    product = lambda site, n, k: Work(site, stage, "product", m=t, n=n, k=k)
    work = [
        product(QKV, s.q + 2 * s.kv, s.d), *attention(s, sequences, before + length, stage, fused=fused_attention),
        product(UP, s.up, s.d), *_moved(s, t, passes, stage, size=size, sp=sp),
    ]  # fmt: skip
    if gelu:
        work.append(Work(UP, stage, "gelu", bytes=gelu * size * t * s.f, values=float(t) * s.f, kernels=0.0))
    if before:
        # Zeros stand for the queries before, whose rows are dropped; keys and values are joined.
        whole = before + length
        moved = sequences * (length * 4 * s.q + whole * 2 * 2 * s.kv)
        work.append(Work(QKV, stage, "zeros", bytes=size * sequences * whole * s.q))
        work.append(Work(QKV, stage, "memory", bytes=size * moved, kernels=4))
    if s.model.qk_norm:
        work.append(Work(QKV, stage, "memory", bytes=2 * size * t * (s.q + s.kv), kernels=2))
    return work + ([product(OUT, s.d, s.q), product(DOWN, s.d, s.f)] if sums else [])


def of_chains(items: Sequence[Work], chains: int) -> list[Work]:
    """Returns one chain's work of a training step, its kernels being the mean of several chains'."""
    share = (1 + (chains - 1) * (1 - JOINED_KERNELS)) / chains
    return [dataclasses.replace(w, kernels=w.kernels * share) for w in items]


def _moved(s: Shard, tokens: int, passes: Passes, stage: str, *, size: int, sp: int) -> list[Work]:
    turned = TURNED / 2 * size * tokens * s.d if sp > 1 else 0.0
    return [
        Work(site, stage, "memory", bytes=nbytes + turned, kernels=passes.kernels / 2)
        for site, nbytes in passes.bytes(s, tokens, size, sp).items()
    ]


def attention(s: Shard, sequences: int, length: int, stage: str, *, fused: bool, tile: int = 128) -> list[Work]:
    """Causal attention. fused: by cuDNN, half of the pairs and the diagonal's tiles; else all pairs' scores in float32,
    which are written and read for the scores, the mask, the softmax and its product."""
    backward = stage == "dx"
    heads, pairs = s.q // s.model.head_dim, float(length) * length
    if fused:
        pairs = length * (length + min(tile, length)) / 2 * heads * sequences
        flops = (5 if backward else 2) * 2 * pairs * s.model.head_dim
        return [Work(QKV, stage, "attention", flops=flops, pairs=pairs)]
    pairs *= heads * sequences
    flops = (4 if backward else 2) * 2 * pairs * s.model.head_dim
    passes = 10 if backward else 6
    return [
        Work(QKV, stage, "attention", flops=flops, pairs=pairs),
        Work(QKV, stage, "memory", bytes=passes * F32 * pairs, kernels=passes),
    ]


def layer_backward(s: Shard, sequences: int, length: int, *, remat: str = "full", fused_attention: bool = True,
                   size: int = 2, sp: int = 1) -> list[Work]:  # fmt: skip
    """One layer's gradients; what is recomputed is not here."""
    t = sequences * length
    qkv, kept = s.q + 2 * s.kv, remat == "none"
    dx = lambda site, n, k: Work(site, "dx", "product", m=t, n=n, k=k)
    dw = lambda site, m, n: Work(site, "dw", "product", m=m, n=n, k=t, beside="backward")
    rotated = ROTATED_BACK if s.model.positions == "rope" else 0
    of_mlp = MLP[s.model.gated_mlp]["dx of kept" if kept else "dx"]
    passes = BACKWARD[s.model.norm][kept].plus(Passes(0, rotated, of_mlp))
    return [
        dx(DOWN, s.f, s.d), dw(DOWN, s.f, s.d), dx(UP, s.d, s.up), dw(UP, s.d, s.up),
        dx(OUT, s.q, s.d), dw(OUT, s.q, s.d),
        *attention(s, sequences, length, "dx", fused=fused_attention),
        dx(QKV, s.d, qkv), dw(QKV, s.d, qkv),
        *_moved(s, t, passes, "dx", size=size, sp=sp), *_summed(s, t, size, sp),
    ]  # fmt: skip


def _summed(s: Shard, tokens: int, size: int, sp: int) -> list[Work]:
    """Sums over tokens: gradients of biases and, in kernels of their own, of a layer norm's scale and bias."""
    found = []
    if s.model.norm == "layernorm":
        # Of each norm the products with normalised values, in float32, and the gradients.
        found.append(Work(UP, "dx", "sum", bytes=2 * (F32 + size) * tokens / sp * s.d, kernels=4, beside="backward"))
    biases = [(s.model.qkv_bias, s.q + 2 * s.kv, 3), (s.model.out_bias, s.d / sp, 1),
              (s.model.mlp_bias, s.up + s.d / sp, 3 if s.model.gated_mlp else 2)]  # fmt: skip
    return found + [
        Work(UP, "dx", "sum", bytes=size * tokens * width, kernels=kernels, beside="backward")
        for has, width, kernels in biases if has
    ]  # fmt: skip


def layer_weights(s: Shard, remat: str, size: int = 2, chains: int = 1) -> list[Work]:
    """Casts of a layer's float32 weights, joined by that, and its gradients, all chains' in one, put where all layers'
    are."""
    cast = (F32 + size) * s.layer_weights
    # In the backward pass again, or the cast weights of all layers are kept: joined ones by a copy, others by a cast.
    kept = cast + 2 * size * s.layer_weights + (2 * size - F32 - size) * s.joined_weights
    moved = cast + (kept if remat == "none" else cast)
    # A product's values are read and written once more, into zeros; joined kernels' are cut apart by that.
    placed = (chains * size + F32) * s.layer_weights
    # Casts for the mlp need nothing of the attention.
    early = (F32 + size) * (s.d * s.up + s.f * s.d)
    return [
        Work(UP, "forward", "memory", bytes=early, kernels=0.0, beside="forward"),
        Work(UP, "forward", "memory", bytes=moved - early, kernels=0.0),
        Work(UP, "dw", "memory", bytes=placed, kernels=0.0, beside="backward"),
        Work(UP, "dw", "zeros", bytes=F32 * s.layer_weights, kernels=0.0),
    ]


def prompt_weights(s: Shard, size: int = 2, chains: int = 1) -> list[Work]:
    """A layer's weights cut out of those of all layers; its kernels joined, once for all chains."""
    del chains
    return [Work(UP, "forward", "memory", bytes=2 * size * (s.layer_weights + s.joined_weights), kernels=0.0)]


def kept(s: Shard, tokens: int, remat: str, passes: int = 1, *, size: int = 2, sp: int = 1) -> list[Work]:
    """Zeros of all that a layer keeps; passes: 1, or COPIED from zeros in each microbatch."""
    nbytes = sum(ZEROS[remat].bytes(s, tokens, size, sp).values())
    if passes == 1:
        return [Work(UP, "forward", "zeros", bytes=nbytes, kernels=0.0)]
    return [Work(UP, "forward", "memory", bytes=passes * nbytes, kernels=0.0)]


def head_loss(s: Shard, tokens: int, chunk: int | None = None, size: int = 2) -> list[Work]:
    """Head, loss and their gradients, in chunks; the last norm with its gradients."""
    chunks = math.ceil(tokens / (chunk or CHUNK))
    c = math.ceil(tokens / chunks)
    logits = float(c) * s.v
    product = lambda stage, m, n, k, out=2: Work("head", stage, "product", chunks, m=m, n=n, k=k, out=out)
    norm = (2 + BACKWARD[s.model.norm][False].stream / 2) * size * tokens * s.d
    return [
        product("forward", c, s.v, s.d, out=F32), product("dx", c, s.d, s.v), product("dw", s.d, s.v, c, out=2 * F32),
        # Two reductions read the float32 logits, one pass more reads them and writes their gradients.
        Work("head", "forward", "memory", chunks, bytes=logits * (3 * F32 + size), kernels=13),
        # Cast once; the float32 gradient is added up chunk by chunk, in the product.
        Work("head", "dw", "memory", bytes=s.table * (F32 + size)),
        Work("head", "dw", "zeros", bytes=s.table * F32),
        # Of a tied table both gradients are added, one of them turned.
        *([Work("head", "dw", "memory", bytes=5 * F32 * s.table, kernels=2)] if s.model.tied_head else []),
        Work("head", "forward", "memory", bytes=norm, kernels=8),
    ]  # fmt: skip


def embed(s: Shard, tokens: int, size: int = 2, *, gradients: bool = True) -> list[Work]:
    """Rows looked up; their gradients scattered into zeros."""
    forward = [Work("embed", "forward", "memory", bytes=2 * size * tokens * s.d)]
    # The scatter copies the zeros that it adds to.
    dw = [
        Work("embed", "dw", "zeros", bytes=F32 * s.table),
        Work("embed", "dw", "memory", bytes=2 * F32 * s.table + (size + 2 * F32) * tokens * s.d),
    ]
    return forward + (dw if gradients else [])


def optimizer(parameters: float, shares: int = 1) -> list[Work]:
    """AdamW on float32: reads gradient, weight and both moments, writes three; the norm reads the gradient once more.

    shares: ranks over which ZeRO-1 cuts it.
    """
    # A kernel for each leaf of the tree and its norm, about 100 in all.
    return [Work("optimizer", "forward", "memory", bytes=parameters / shares * F32 * (7 + 1), kernels=100)]


def accumulate(parameters: float, times: int) -> list[Work]:
    """Gradients of `times` microbatches added up: two read, one written; a kernel for each array, others for zeros."""
    moved = 3 * F32 * parameters * times
    return [Work("optimizer", "dw", "memory", bytes=moved, kernels=50 * times)] if times > 1 else []
