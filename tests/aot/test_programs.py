"""Compressed collectives as XLA compiles them for H100s: kernels, collectives of uint8, nothing else that is large."""

import functools

import jax
import jax.numpy as jnp
import pytest
import spelled_out
from aot.instructions import collectives, copies, counters, kernels, slices_of_kernels
from aot.topology import compile_on_four, compile_on_mesh, compile_on_one, compile_partly
from jax import lax
from mosaic_programs import PRESETS
from rank_programs import gradient_of_sum
from spelled_out import every_size

import taco_jax
from pallas_kernels import compat, mosaic
from pallas_kernels.mosaic import pipeline
from taco_jax import CODECS
from taco_jax.collectives.transport import chunk_elements
from taco_jax.compression import dispatch

S = 4 * 64 * 256 * 16  # whole tiles for each of four ranks, whatever the block
RAGGED = (S + 37, S + 128 * 3 + 8, S - 1)
DYNAMIC = 64 * 128 * 132 * 4 * pipeline.MIN_DYNAMIC_TILES_PER_WORKER  # enough tiles for the dynamic tile scheduler
# Matrices of rotations, tails and scales are smaller.
LARGE = S // 16


def psum(x, codec="taco", **options):
    return lax.pcast(spelled_out.psum(x, "tp", codec=codec, link="nccl", **options), "tp", to="varying")


def shape(*dims, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(dims, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", PRESETS)
def test_psum_is_three_kernels_and_two_collectives(name, dtype):
    compiled = compile_on_four(lambda x: psum(x, name), shape(S, dtype=dtype))
    assert kernels(compiled) == 3
    wires = 4 * CODECS[name].wire_bytes(S // 4)
    assert collectives(compiled) == [("all-gather", "u8", wires), ("all-to-all", "u8", wires)]
    assert copies(compiled, LARGE) == []


@pytest.mark.parametrize("tp", [2, 4])
def test_a_region_that_is_manual_over_tp_only_has_the_kernels_of_one_piece(tp):
    compiled = compile_partly(psum, shape(2, tp * S), dp=2, tp=tp)
    assert kernels(compiled) == (2 if tp == 2 else 3)
    wires = CODECS["taco"].wire_bytes(S) * 2 if tp == 2 else 4 * CODECS["taco"].wire_bytes(S // 4)
    ops = ("all-gather",) if tp == 2 else ("all-gather", "all-to-all")
    assert collectives(compiled) == [(op, "u8", wires) for op in ops]


@pytest.mark.skipif(not compat.WARPS_KNOW_THE_MESH, reason="kernels over NVLink need jax 0.11")
def test_a_region_that_is_manual_over_tp_only_has_the_kernel_over_nvlink():
    compression = taco_jax.Compression("int8h", link="nvlink", min_bytes=0)
    f = lambda x: lax.pcast(taco_jax.psum(x, "tp", compression=compression), "tp", to="varying")
    compiled = compile_partly(f, shape(2, 2 * S), dp=2, tp=2)
    assert kernels(compiled) == 1 and collectives(compiled) == []


@pytest.mark.parametrize("codec,between", [("taco", None), ("int8h", "int4h")])
@pytest.mark.parametrize("local", [2, 4])
def test_levels_are_kernels_and_collectives_of_bytes(codec, between, local):
    """Two hosts: encode, a sum for each host's shares, encode, the sum of both, encode, decode."""
    options = {"algorithm": "hierarchical", "ranks_per_host": local, "between_hosts": between}
    compiled = compile_on_four(lambda x: psum(x, codec, **options), shape(S))
    if local == 4:  # one host: flat
        assert kernels(compiled) == 3
        return
    assert kernels(compiled) == 7
    inside, outside = 4 * CODECS[codec].wire_bytes(S // 4), 2 * CODECS[between or codec].wire_bytes(S // 2)
    wanted = [("all-gather", "u8", inside), ("all-gather", "u8", outside), ("all-to-all", "u8", inside)]
    assert collectives(compiled) == sorted(wanted)
    # The sums of both shares are put side by side, or not even that.
    assert len(copies(compiled, LARGE)) <= 3, copies(compiled, LARGE)


@pytest.mark.parametrize("algorithm,count", [("two_shot", 3), ("one_shot", 2)])
def test_error_feedback_is_no_pass_more(algorithm, count):
    """The error that comes in is added by the product, and the encoders leave the one that goes out; in two-shot that
    of the own share is put in its place."""

    def f(h, w, error):
        options = every_size("int4h", algorithm=algorithm)
        y, error = taco_jax.psum_with_feedback(h @ w, "tp", error, compression=options)
        return error + lax.pcast(y, "tp", to="varying")

    m = S // 1024
    compiled = compile_on_four(f, shape(m, 256), shape(256, 1024), shape(m, 1024))
    sent, shares = {"two_shot": (("all-gather", "all-to-all"), 4), "one_shot": (("all-gather",), 1)}[algorithm]
    wires = 4 * CODECS["int4h"].wire_bytes(S // shares)
    assert collectives(compiled) == [(name, "u8", wires) for name in sent]
    assert kernels(compiled) == count
    passes = copies(compiled, LARGE)
    assert len([i for i in passes if "dot" not in i.name]) == 1, passes


def rows(x):
    return x.reshape(4, -1)


@pytest.mark.parametrize(
    "f,passes",
    [
        (lambda x: taco_jax.psum_scatter(rows(x), "tp", compression=every_size("int6h", link="nccl")), 0),
        (lambda x: taco_jax.all_gather(x, "tp", compression=every_size("int6h", link="nccl")), 0),
        # The own row is not quantised: it is put in its place afterwards.
        (lambda x: taco_jax.all_to_all(rows(x), "tp", 0, 0, compression=every_size("int6h"), tiled=True), 1),
        (lambda x: psum(x, "int6h", algorithm="one_shot"), 0),
    ],
    ids=["psum_scatter", "all_gather", "all_to_all", "one_shot"],
)
def test_other_collectives_are_two_kernels(f, passes):
    compiled = compile_on_four(f, shape(S))
    assert kernels(compiled) == 2
    assert {dtype for _, dtype, _ in collectives(compiled)} == {"u8"}
    assert len(copies(compiled, LARGE)) <= passes


def test_layers_in_a_scan_with_remat():
    compression = taco_jax.Compression("int6h", min_bytes=0, link="nccl")
    gradient = functools.partial(gradient_of_sum, compression)
    compiled = compile_on_four(gradient, shape(), shape(3, 1024, 256), shape(3, 256, 1024))
    # Forward, and backward, where the forward's is run again or not; each body of a loop counts once.
    assert kernels(compiled) in (6, 9)
    assert {dtype for _, dtype, elements in collectives(compiled) if elements > 1000} == {"u8"}


@pytest.mark.parametrize("name", ["taco", "int4h"])
def test_a_copied_sum_is_two_kernels_and_a_permutation(name):
    psum = lambda x: taco_jax.psum(x, "tp", compression=every_size(name, link="copy"))
    compiled = compile_on_mesh(lambda x: lax.pcast(psum(x), "tp", to="varying"), shape(S), tp=2)
    assert kernels(compiled) == 2
    assert collectives(compiled) == [("collective-permute", "u8", CODECS[name].wire_bytes(S))]
    assert copies(compiled, LARGE) == []


@pytest.mark.parametrize("size", RAGGED)
def test_a_tail_copies_nothing_on_its_way_out(size):
    compiled = compile_on_four(psum, shape(size))
    wires = 4 * CODECS["taco"].wire_bytes(chunk_elements(CODECS["taco"], size, 4))
    assert collectives(compiled) == [("all-gather", "u8", wires), ("all-to-all", "u8", wires)]
    # The result, whose tail comes from a kernel of its own, is put together by at most one more pass. XLA of jax 0.10
    # copies the whole rows for the kernels first.
    written = copies(compiled, size // 2)
    assert len(written) <= (2 if jax.__version_info__ < (0, 11) else 1), written
    # Kernels read the whole rows where they lie: x from its start.
    assert all(start == 0 for _, start in slices_of_kernels(compiled))


def slice_at_5(x):
    return psum(x[5 : 5 + S])


def slice_in_a_loop(x):
    def step(i, total):
        piece = lax.dynamic_slice(x, (i * 1001,), (S,), allow_negative_indices=False)
        return total + psum(piece)[:8]

    return lax.fori_loop(0, 3, step, lax.pcast(jnp.zeros((8,), x.dtype), "tp", to="varying"))


def update_at_5(x):
    return lax.dynamic_update_slice(x * 2, psum(x[:S]), (5,))


def update_in_a_loop(x):
    def step(i, y):
        return lax.dynamic_update_slice(y, psum(x[:S] + i.astype(x.dtype)), (i * 1001,), allow_negative_indices=False)

    return lax.fori_loop(0, 3, step, x)


def scattered_slice(x):
    return taco_jax.psum_scatter(x[5 : 5 + S].reshape(4, -1), "tp", compression=every_size("taco", link="nccl"))


def gathered_slice(x):
    return taco_jax.all_gather(x[5 : 5 + S], "tp", compression=every_size("int4h", link="nccl"))


@pytest.mark.parametrize("decode", ["decode", "sum_decode"])
def test_kernels_read_whole_wires(decode):
    codec, n = CODECS["int6h"], 1 << 17
    w = codec.wire_bytes(n)

    def f(bytes_):
        wires = bytes_[5 : 5 + 2 * w].reshape(2, w)
        if decode == "decode":
            return dispatch.decode(codec, dispatch.Geometry(2 * n, 2, n), wires, jnp.bfloat16, None)
        return dispatch.sum_decode(codec, wires, n, jnp.bfloat16, None)

    compiled = compile_on_four(f, jax.ShapeDtypeStruct((2 * w + 5000,), jnp.uint8))
    assert kernels(compiled) == 1
    assert all(start is not None and start % 16 == 0 for _, start in slices_of_kernels(compiled))


@pytest.mark.parametrize(
    "f", [slice_at_5, slice_in_a_loop, update_at_5, update_in_a_loop, scattered_slice, gathered_slice]
)
def test_kernels_read_and_write_whole_buffers(f):
    # A copy by the tensor memory accelerator starts at a multiple of 16 bytes. XLA would let a kernel read a caller's
    # slice, and write into his update, in place, wherever it starts.
    compiled = compile_on_four(f, shape(S + 4096))
    assert kernels(compiled) >= 2
    assert all(start is not None and start % 16 == 0 for _, start in slices_of_kernels(compiled))


@pytest.mark.skipif(not compat.KERNELS_TAKE_REFS, reason="before jax 0.11 there is no dynamic tile scheduler")
def test_each_scheduler_has_a_counter_of_its_own():
    # A constant is never written to: every launch gets a copy of 4 bytes, in a loop as well.
    def f(x):
        fmt, geometry = dispatch.to_format(CODECS["int8h"]), dispatch.Geometry(DYNAMIC, 4, DYNAMIC // 4)

        def body(carry, _):
            wires, _ = mosaic.encode(fmt, geometry, carry, None, None)
            return mosaic.decode(fmt, geometry, wires, carry.dtype, None), None

        return lax.scan(body, x, length=2)[0]

    compiled = compile_on_one(f, shape(DYNAMIC))
    found = counters(compiled)
    assert len(found) == kernels(compiled) == 2
    assert len(set(found)) == 2 and all(made_by == "copy" for made_by, _ in found), found
