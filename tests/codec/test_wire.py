"""Packing, byte planes and sections, by hand-written examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats import section_offsets
from taco_jax.codec import wire

pack = jax.jit(wire.pack, static_argnums=1)


def u8(*values):
    return np.array(values, np.uint8)


def test_four_bits():
    # byte j = q[j] & 15 | q[j + B/2] << 4
    packed = pack(u8(1, 2, 3, 4, 5, 6, 7, 8), 4)
    assert [hex(b) for b in np.asarray(packed)] == ["0x51", "0x62", "0x73", "0x84"]


def test_six_bits():
    # Quarters (1, 2) (3, 4) (5, 6) (63, 0). First element of each: 1 | 3 << 6 | 5 << 12 | 63 << 18 = 0xfc50c1, second:
    # 2 | 4 << 6 | 6 << 12 | 0 = 0x006102; the low bytes come first, as a run.
    packed = pack(u8(1, 2, 3, 4, 5, 6, 63, 0), 6)
    assert [hex(b) for b in np.asarray(packed)] == ["0xc1", "0x2", "0x50", "0x61", "0xfc", "0x0"]


def test_five_bits():
    # 1 | 2 << 5 | 3 << 10 | 4 << 15 | 5 << 20 | 6 << 25 | 7 << 30 | 31 << 35
    packed = pack(u8(1, 2, 3, 4, 5, 6, 7, 31), 5)
    assert [hex(b) for b in np.asarray(packed)] == ["0x41", "0xc", "0x52", "0xcc", "0xf9"]


def test_eight_bits_stay():
    codes = u8(0, 255, 127, 128)
    np.testing.assert_array_equal(pack(codes, 8), codes)


@pytest.mark.parametrize("bits", [3, 4, 5, 6, 8])
def test_unpack_reads_what_pack_wrote(bits):
    blocks = [np.random.default_rng(bits).integers(0, 256, (2, 3, n)).astype(np.uint8) for n in (8, 32, 128)]

    @jax.jit
    def both_ways(codes):
        packed = wire.pack(codes, bits)
        return packed, wire.unpack(packed, bits)

    for codes in blocks:
        packed, read = both_ways(codes)
        assert packed.shape == (2, 3, codes.shape[-1] * bits // 8) and packed.dtype == jnp.uint8
        np.testing.assert_array_equal(read, codes & ((1 << bits) - 1))  # high bits are ignored


def test_byte_planes_are_little_endian():
    words = jnp.array([0x01020304, 0xFFFEFDFC], jnp.uint32)
    planes = wire.split_bytes(words, 4)
    assert [list(map(int, p)) for p in planes] == [[4, 0xFC], [3, 0xFD], [2, 0xFE], [1, 0xFF]]
    np.testing.assert_array_equal(wire.join_bytes(planes), words)
    assert [int(w) for w in wire.join_bytes(planes[:2])] == [0x0304, 0xFDFC]


def test_sections_start_at_128_and_messages_end_at_1024():
    assert section_offsets([128, 1]) == ([0, 128], 1024)
    assert section_offsets([129, 5, 5]) == ([0, 256, 384], 1024)
    assert section_offsets([1024]) == ([0], 1024)
    assert section_offsets([1024, 1]) == ([0, 1024], 2048)
    assert section_offsets([900, 125, 1]) == ([0, 1024, 1152], 2048)


def test_assembled_gaps_are_zero():
    sections = [np.full((2, n), i + 1, np.uint8) for i, n in enumerate((130, 128, 3))]
    message = np.asarray(wire.assemble([jnp.asarray(s) for s in sections]))
    assert message.shape == (2, 1024)
    expected = np.zeros(1024, np.uint8)
    expected[:130], expected[256:384], expected[384:387] = 1, 2, 3
    np.testing.assert_array_equal(message, [expected] * 2)
    for section, read in zip(sections, wire.disassemble(jnp.asarray(message), [130, 128, 3])):
        np.testing.assert_array_equal(read, section)


def test_a_full_message_has_no_gaps():
    section = jnp.arange(1024).astype(jnp.uint8)
    np.testing.assert_array_equal(wire.assemble([section]), section)
