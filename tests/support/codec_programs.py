"""What the tests of the codec share: whole lists of tensors through one program, and data."""

import functools

import jax
import numpy as np

from taco_jax import CODECS

# Those whose blocks have one size and one element; the others have files of their own.
PRESETS = [name for name, codec in CODECS.items() if not (codec.exact or codec.per_token or codec.mixed)]


@functools.partial(jax.jit, static_argnums=0)
def encode_decode(codec, xs, exponent=None, key=None):
    """(messages, what is read of them) of a list of tensors.

    One program, whichever of both is wanted: compiling is what these tests would spend their time on. So use few
    shapes, and call it again rather than with a longer list.
    """
    messages = jax.tree.map(lambda x: codec.encode(x, exponent=exponent, key=key), xs)
    return messages, jax.tree.map(
        lambda x, message: codec.decode(message, x.shape, x.dtype, exponent=exponent), xs, messages
    )


def encode(codec, xs, exponent=None):
    return encode_decode(codec, xs, exponent)[0]


def round_trip(codec, xs, exponent=None, key=None):
    return encode_decode(codec, xs, exponent, key)[1]


def gaussian(n=1 << 17, seed=0):
    return np.random.default_rng(seed).normal(size=n).astype(np.float32)
