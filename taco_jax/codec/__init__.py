"""How a message is written as bytes.

codec: `Codec` and its presets, the reference for every kernel. elements: the types of codes. block_scale: the scale
of a block. hadamard: rotations. stochastic_rounding: its noise. tah: tiles of 3 or 4 bits. wire: the layout of a
message.
"""

from taco_jax.codec.codec import (
    AUTO,
    CODECS,
    FLOAT_DTYPES,
    STATS,
    TOKEN,
    UNCALIBRATED,
    Codec,
    as_codec,
    check_choice,
)

__all__ = ["AUTO", "CODECS", "FLOAT_DTYPES", "STATS", "TOKEN", "UNCALIBRATED", "Codec", "as_codec", "check_choice"]
