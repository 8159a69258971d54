"""Collectives over NVLink as XLA compiles them for H100s: one kernel, no collective, nothing else that is large.

What ptxas spills of their registers is held to what was measured, as in `test_spills.py`.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
import spelled_out
from aot.instructions import collectives, copies, kernels, slices_of_kernels
from aot.topology import FITTED, compile_on_mesh, spills
from covers import cover
from jax import lax
from mosaic_programs import DTYPES, PRESETS
from rank_programs import gradient_of_sum
from spelled_out import every_size

import taco_jax
from pallas_kernels import Geometry, compat, nvlink
from taco_jax import CODECS
from taco_jax.collectives import to_varying
from taco_jax.compression.dispatch import to_format

pytestmark = pytest.mark.skipif(not compat.WARPS_KNOW_THE_MESH, reason="NVLink kernels need jax 0.11")

PROGRAMS = ("two_shot", "one_shot", "reduce_scatter", "all_gather")
GROUP = 8 * 128  # elements of 8 rows, of every preset
N = GROUP * 8 * 32  # elements of a message: 32 tiles
# So many tiles that each CTA has several, and a signal is for several: with one for each there are no loops.
LONG = GROUP * 8 * 132 * 16
# Rotations, semaphores and the largest values of warps are smaller.
LARGE = N // 4
MESHES = ({"dp": 2, "tp": 2}, {"tp": 2, "dp": 2}, {"dp": 2, "tp": 4})
# Bytes of a thread's local memory; what is not here spills nothing, nor does what rotates nothing. A warpgroup that
# sums and rotates back (of a reduce-scatter) has 160 registers: it spills addresses in bfloat16, parts of the sum in
# float16, of which two parts are rotated, and in float32, where a CTA has two such (240, and few bytes, for one).
FEW_BYTES = 0 if FITTED else 64
SPILLS = {
    ("reduce_scatter", "bfloat16"): 160, ("reduce_scatter", "float16"): 1280, ("reduce_scatter", "float32"): 1536,
    ("two_shot", "float32"): 1024, ("one_shot", "float32"): 512, ("all_gather", "float32"): 384,
}  # fmt: skip
# Couriers, who have 24 registers, keep some of seven peers' addresses there, once for each frame.
EIGHT_RANKS = 160
# What was compiled before is not compiled again: (whether it is one kernel, its copies, what ptxas said of it).
COMPILED = {}


def shape(*dims, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(dims, dtype)


def varying(y):
    """As the library types a result."""
    return to_varying(y, frozenset(jax.sharding.get_abstract_mesh().axis_names))


def all_reduce(x, messages, codec="taco", n=None):
    """The sum of x in its own shape, in messages of n elements, the last one maybe of fewer."""
    geometry = Geometry(x.size, messages, n or x.size // messages)
    return varying(nvlink.all_reduce(to_format(CODECS[codec]), geometry, x.reshape(-1), "tp")[0]).reshape(x.shape)


def program(kind, codec, n, ranks):
    """(function, elements of its operand) of a collective of messages of n elements."""
    fmt = to_format(CODECS[codec])
    return {
        "two_shot": (lambda x: all_reduce(x, ranks, codec), n * ranks),
        "one_shot": (lambda x: all_reduce(x, 1, codec), n),
        "reduce_scatter": (lambda x: nvlink.reduce_scatter(fmt, x.reshape(ranks, n), "tp")[0], n * ranks),
        "all_gather": (lambda x: nvlink.all_gather(fmt, x, "tp")[0], n),
    }[kind]


def check(kind, codec, dtype, n, ranks, capfd):
    case = kind, codec, dtype, n, ranks
    if case not in COMPILED:
        operation = "all_reduce" if kind in ("two_shot", "one_shot") else kind
        assert nvlink.why_unsupported(to_format(CODECS[codec]), operation, dtype, ranks, per_message=n) is None
        run, size = program(kind, codec, n, ranks)
        capfd.readouterr()
        compiled = compile_on_mesh(run, shape(size, dtype=dtype), tp=ranks)
        COMPILED[case] = one_kernel(compiled), copies(compiled, LARGE), capfd.readouterr().out
    is_one, copied, reported = COMPILED[case]
    assert is_one and copied == []
    assert "for 'sm_90a'" in reported, reported
    found = spills(reported)
    most = SPILLS.get((kind, dtype), 0) if CODECS[codec].rotation != "none" else 0
    most += FEW_BYTES + (EIGHT_RANKS if ranks == 8 else 0)
    assert found and all(max(kernel) <= most for kernel in found), reported


def one_kernel(compiled) -> bool:
    return kernels(compiled) == 1 and collectives(compiled) == []


@pytest.mark.parametrize("codec", PRESETS)
@pytest.mark.parametrize("kind", PROGRAMS)
def test_presets_in_the_form_that_models_use(kind, codec, capfd):
    check(kind, codec, "bfloat16", LONG, 4, capfd)


CASES = dict(dtype=DTYPES[1:], kind=PROGRAMS, ranks=(4, 2, 8), codec=("taco", "e5m2", "int5h"))
MOST = ("float16", "reduce_scatter", 4, "taco")  # spills most of float16


@pytest.mark.parametrize("case", [*cover(2, **CASES), MOST], ids=lambda case: "-".join(map(str, case)))
def test_other_dtypes_and_ranks(case, capfd):
    dtype, kind, ranks, codec = case
    check(kind, codec, dtype, LONG, ranks, capfd)


@pytest.mark.parametrize("kind,ranks", [("two_shot", 2), ("two_shot", 8), ("one_shot", 2), ("reduce_scatter", 8)])
def test_two_and_eight_ranks(kind, ranks, capfd):
    check(kind, "taco", "bfloat16", LONG, ranks, capfd)


@pytest.mark.slow
@pytest.mark.parametrize("codec", PRESETS)
@pytest.mark.parametrize("kind", PROGRAMS)
def test_every_preset(kind, codec, capfd):
    for dtype, n, ranks in itertools.product(DTYPES, (N, LONG), (4, 2, 8)):
        check(kind, codec, dtype, n, ranks, capfd)


@pytest.mark.parametrize("axes", MESHES, ids=lambda axes: "x".join(f"{name}{n}" for name, n in axes.items()))
def test_meshes_of_two_axes(axes):
    run, size = program("two_shot", "taco", N, axes["tp"])
    compiled = compile_on_mesh(run, shape(size), **axes)
    assert one_kernel(compiled) and copies(compiled, LARGE) == []


# Elements of x and of a message: the last one is shorter, or empty; rows are whole groups of 8, and no tiles of 64.
ODD = (
    (4 * N - 3 * GROUP, N), (4 * 41 * GROUP, 41 * GROUP), (4 * 41 * GROUP - 3 * GROUP, 41 * GROUP),
    (3 * 8 * GROUP + GROUP, 8 * GROUP), (3 * N, N),
)  # fmt: skip


@pytest.mark.parametrize("size,n", ODD)
def test_sums_whose_messages_differ(size, n):
    compiled = compile_on_mesh(lambda x: all_reduce(x, 4, "taco", n), shape(size))
    assert one_kernel(compiled) and copies(compiled, size // 4) == []


@pytest.mark.parametrize("kind", PROGRAMS[1:])
def test_messages_that_are_no_whole_tiles(kind):
    run, size = program(kind, "taco", 41 * GROUP, 4)
    compiled = compile_on_mesh(run, shape(size))
    assert one_kernel(compiled) and copies(compiled, size // 4) == []


@pytest.mark.parametrize("size", [4 * N + 5, 4 * N + 7 * GROUP + 1023])
def test_a_tail_is_a_small_sum_beside_the_kernel(size):
    compiled = compile_on_mesh(lambda x: library_psum(x), shape(size))
    assert kernels(compiled) == 1
    assert collectives(compiled) == [("all-reduce", "f32", size % GROUP)]
    # The result is put together by one more pass. Kernels read the whole rows where they lie: x from its start.
    assert len(copies(compiled, size // 2)) <= 1
    assert all(start == 0 for _, start in slices_of_kernels(compiled))


def library_psum(x, codec="taco", **options):
    return to_varying(spelled_out.psum(x, "tp", codec=codec, link="nvlink", **options), "tp")


def test_the_library_adds_nothing():
    for f in (
        library_psum,
        lambda x: taco_jax.psum_scatter(x.reshape(4, -1), "tp", compression=every_size("taco", link="nvlink")),
        lambda x: taco_jax.all_gather(x, "tp", compression=every_size("taco", link="nvlink")),
    ):
        compiled = compile_on_mesh(f, shape(4 * N))
        assert one_kernel(compiled) and copies(compiled, LARGE) == []


def test_in_a_scan():
    compiled = compile_on_mesh(lambda x: lax.scan(lambda x, _: (all_reduce(x, 4), None), x, length=3)[0], shape(4 * N))
    assert one_kernel(compiled)  # the body of a loop counts once
    # The carry comes to the loop's own buffer, and the result from the kernel's: a copy before, and one in each turn.
    assert len(copies(compiled, N)) <= 2


def test_layers_in_a_scan_with_remat():
    # As in `test_programs.py`, with a kernel for each sum.
    compression = taco_jax.Compression("int6h", min_bytes=0, link="nvlink")
    gradient = functools.partial(gradient_of_sum, compression)
    compiled = compile_on_mesh(gradient, shape(), shape(3, 1024, 256), shape(3, 256, 1024))
    # Forward, and backward, where the forward's is run again or not.
    assert kernels(compiled) in (2, 3)
    assert [elements for _, _, elements in collectives(compiled) if elements > 1000] == []


def test_beside_other_collectives():
    def f(x, y):
        a = all_reduce(x, 4)[:N] + to_varying(lax.psum(y, "tp"), "tp")
        return a + library_psum(y * 2, "int4h", algorithm="one_shot") + lax.all_gather(y, "tp").sum(0)

    compiled = compile_on_mesh(f, shape(4 * N), shape(N))
    assert kernels(compiled) == 2
    assert collectives(compiled) == [("all-gather", "bf16", 4 * N), ("all-reduce", "bf16", N)]


def slice_in_a_loop(x):
    def step(i, total):
        return total + all_reduce(lax.dynamic_slice(x, (i * 1001,), (4 * N,), allow_negative_indices=False), 4)[:8]

    return lax.fori_loop(0, 3, step, varying(jnp.zeros((8,), x.dtype)))


def update_at_5(x):
    return lax.dynamic_update_slice(x * 2, all_reduce(x[: 4 * N], 4), (5,))


def update_in_a_loop(x):
    def step(i, y):
        z = all_reduce(x[: 4 * N] + i.astype(x.dtype), 4)
        return lax.dynamic_update_slice(y, z, (i * 1001,), allow_negative_indices=False)

    return lax.fori_loop(0, 3, step, x)


@pytest.mark.parametrize("f", [slice_in_a_loop, update_at_5, update_in_a_loop])
def test_kernels_read_and_write_whole_buffers(f):
    # As in `test_programs.py`: copies by the tensor memory accelerator start at multiples of 16 bytes.
    compiled = compile_on_mesh(f, shape(4 * N + 4096))
    assert one_kernel(compiled)
    assert all(start is not None and start % 16 == 0 for _, start in slices_of_kernels(compiled))


def test_messages_that_are_not_the_ranks_are_refused():
    with pytest.raises(ValueError, match="must be one message, or one for each of the 4 ranks"):
        compile_on_mesh(lambda x: all_reduce(x, 2), shape(4 * N))


def test_a_sum_that_is_not_of_whole_rows_is_refused():
    with pytest.raises(ValueError, match="is not of the whole groups of 8 rows of x, which has"):
        compile_on_mesh(lambda x: all_reduce(x, 4, n=N), shape(4 * N - 5))
