"""The inlined MLIR of `pallas_kernels/mosaic/registers`, which the interpreter does not run, evaluated in numpy for all
threads."""

import jax.numpy as jnp
import mosaic_model
import numpy as np
import pytest
from mosaic_model import Memory

from pallas_kernels import Format, Geometry
from pallas_kernels.formats import KERNEL_ELEMENTS, packing_parts
from pallas_kernels.mosaic import elements
from pallas_kernels.mosaic.registers import layout, pack_int, thread_blocks
from pallas_kernels.mosaic.tiling import TILE_ROWS, Tiling

INTEGERS = ("int8", "int6", "int5", "int4")


@pytest.fixture(autouse=True)
def model(monkeypatch):
    mosaic_model.install(monkeypatch)


def unordered(array, run):
    """Positions -> columns."""
    return array[:, np.argsort(layout.columns(array.shape[1], run))]


def ordered(array, run):
    return array[:, layout.columns(array.shape[1], run)]


def packed(fmt, codes):
    """int32 codes [64, columns] in order -> bytes, block by block."""
    out = []
    for start in range(0, codes.shape[1], fmt.block):
        block = codes[:, start : start + fmt.block]
        parts = np.split(block, packing_parts(fmt.bits), axis=1)
        out += [block.astype(np.uint8)] if fmt.bits == 8 else elements.pack(fmt, [jnp.asarray(part) for part in parts])
    return np.concatenate([np.asarray(piece) for piece in out], axis=1)


def all_codes(fmt, columns):
    return np.random.default_rng(0).permutation(np.arange(TILE_ROWS * columns)).reshape(TILE_ROWS, columns) % (
        1 << fmt.bits
    )


@pytest.mark.parametrize("element", INTEGERS)
@pytest.mark.parametrize("block", [64, 128, 256])
def test_pack_int_of_rotated_integers(element, block):
    fmt = Format(element, block, "hadamard", "bfloat16")
    if not pack_int.can_unpack(fmt):
        pytest.skip("runs are shorter than a word for each thread")
    codes = all_codes(fmt, block)
    signed = np.where(codes >> (fmt.bits - 1), codes - (1 << fmt.bits), codes)
    run = layout.run_columns(fmt)
    memory = Memory(np.full((TILE_ROWS, 256 + 128), 0xAA, np.uint8))
    finite = np.arange(TILE_ROWS) % 5 != 0
    numbers = signed.astype(np.float32) + np.float32(12582912)
    parts = [ordered(numbers[:, o : o + run].view(np.int32), run) for o in range(0, block, run)]
    pack_int.pack_block(fmt, memory, 128, parts, finite)
    size = block * fmt.bits // 8
    expected = np.where(finite[:, None], packed(fmt, codes), 0)
    np.testing.assert_array_equal(memory.array[:, 128 : 128 + size], expected)
    assert (memory.array[:, :128] == 0xAA).all() and (memory.array[:, 128 + size :] == 0xAA).all()
    memory = Memory(np.pad(packed(fmt, codes), ((0, 0), (128, 128))))
    for dtype in (jnp.float32, jnp.float16):
        values = np.concatenate([unordered(v, run) for v in pack_int.unpack_block(fmt, memory, 128, dtype)], axis=1)
        assert values.dtype == dtype
        np.testing.assert_array_equal(values, signed)


THREAD_BLOCKS = [name for name in KERNEL_ELEMENTS if name != "int5"]


@pytest.mark.parametrize("element", THREAD_BLOCKS)
def test_thread_blocks_codes_are_read(element):
    fmt = Format(element, 32, "none", "e8m0")
    codes = all_codes(fmt, 128)
    values = unordered(thread_blocks.unpack(fmt, Memory(packed(fmt, codes))), 128)
    given = jnp.asarray(codes, jnp.uint8 if fmt.bits == 8 else jnp.int32)
    np.testing.assert_array_equal(values, np.asarray(elements.from_codes(fmt, given)))


def borders(fmt):
    """Values at, just below and just above each code and each rounding border, of both signs, and random ones."""
    codes = jnp.arange(1 << fmt.bits)
    exact = np.asarray(elements.from_codes(fmt, codes.astype(jnp.uint8) if fmt.bits == 8 else codes))
    exact = np.unique(exact[np.abs(exact) <= fmt.maximum])
    points = np.concatenate([exact, (exact[1:] + exact[:-1]) / 2]).astype(np.float32)
    near = [np.nextafter(points, np.float32(way), dtype=np.float32) for way in (-np.inf, np.inf)]
    rng = np.random.default_rng(0)
    random = rng.uniform(-fmt.maximum, fmt.maximum, 4096).astype(np.float32)
    tiny = random * np.float32(2.0) ** rng.integers(-140, 0, 4096).astype(np.float32)
    found = np.concatenate([points, *near, random, tiny, [0.0, -0.0]])
    found = found[np.abs(found) <= fmt.maximum]
    return np.pad(found, (0, -found.size % (TILE_ROWS * 128))).reshape(-1, TILE_ROWS, 128).astype(np.float32)


@pytest.mark.parametrize("element", THREAD_BLOCKS)
def test_thread_blocks_values_are_rounded_and_written(element):
    fmt = Format(element, 32, "none", "e8m0")
    keep = np.repeat(np.where(np.arange(TILE_ROWS * 4).reshape(TILE_ROWS, 4) % 7, -1, 0), 2, axis=1).astype(np.int32)
    for values in borders(fmt):
        memory = Memory(np.zeros((TILE_ROWS, 128 * fmt.bits // 8), np.uint8))
        thread_blocks.pack(fmt, memory, ordered(values, 128), keep)
        codes = np.asarray(elements.to_codes(fmt, jnp.asarray(values), None, True))
        expected = packed(fmt, np.where(np.repeat(keep[:, ::2], 32, axis=1), codes, 0))
        np.testing.assert_array_equal(memory.array, expected)


@pytest.mark.parametrize("element", [name for name in THREAD_BLOCKS if name not in INTEGERS])
def test_thread_blocks_values_above_the_maximum(element):
    """A site's scale may be below what a block needs."""
    fmt = Format(element, 32, "none", "ue5m3")
    assert Tiling(fmt, Geometry(8192, 1, 8192)).one_thread_per_block
    values = np.linspace(-2 * fmt.maximum, 2 * fmt.maximum, TILE_ROWS * 128, dtype=np.float32).reshape(TILE_ROWS, 128)
    clipped = elements.clip(fmt, jnp.asarray(values), False)
    memory = Memory(np.zeros((TILE_ROWS, 128 * fmt.bits // 8), np.uint8))
    thread_blocks.pack(fmt, memory, ordered(np.asarray(clipped), 128), np.full((TILE_ROWS, 8), -1, np.int32))
    codes = np.asarray(elements.to_codes(fmt, jnp.asarray(values), None, True))
    np.testing.assert_array_equal(memory.array, packed(fmt, codes.astype(np.int32)))


def swizzled(array):
    """[64, 128] as it lies in shared memory: tiles of 8 rows of 128 bytes, pieces of 16 bytes moved by their line."""
    count = 16 // array.dtype.itemsize
    pieces = array.reshape(8, 8, -1, 8, count).transpose(0, 2, 1, 3, 4)
    line, piece = np.indices((8, 8))
    out = np.empty_like(pieces)
    out[:, :, line, piece ^ line] = pieces[:, :, line, piece]
    return out.reshape(TILE_ROWS, 128)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_thread_blocks_tiles_are_moved(dtype):
    array = np.arange(TILE_ROWS * 128, dtype=np.float32).reshape(TILE_ROWS, 128) % 256
    array += np.arange(TILE_ROWS, dtype=np.float32)[:, None] / 4 if dtype == "float32" else 0
    array = array.astype(jnp.dtype(dtype))
    tiles = (8, array.dtype.itemsize, 8, 128 // array.dtype.itemsize)
    memory = Memory(swizzled(array), tiles)
    np.testing.assert_array_equal(
        unordered(np.asarray(thread_blocks.load_tile(memory, False)), 128), array.astype(np.float32)
    )
    memory = Memory(np.zeros_like(array), tiles)
    thread_blocks.store_tile(memory, ordered(array, 128), False)
    np.testing.assert_array_equal(memory.array, swizzled(array))


def test_thread_blocks_scale_bytes_are_moved():
    planes = np.arange(TILE_ROWS * 4).reshape(TILE_ROWS, 4)
    loaded = thread_blocks.load_scales(Memory(planes.astype(np.uint8)), False)
    np.testing.assert_array_equal(loaded, np.repeat(planes, 2, axis=1))
    memory = Memory(np.zeros(256, np.uint8))
    thread_blocks.store_scales(memory, np.repeat(planes + 512, 2, axis=1).astype(np.int32), False)
    np.testing.assert_array_equal(memory.array, planes.reshape(-1).astype(np.uint8))


def test_thread_blocks_maxima_keep_nan():
    x = np.random.default_rng(0).standard_normal((TILE_ROWS, 128)).astype(np.float32)
    x[3, 40], x[5, 127] = np.nan, -np.inf
    bits = np.asarray(thread_blocks.block_maxima(ordered(x, 128), False))
    wanted = np.abs(x).reshape(TILE_ROWS, 4, 32).max(2)
    np.testing.assert_array_equal(bits.view(np.float32), np.repeat(wanted, 2, axis=1))
