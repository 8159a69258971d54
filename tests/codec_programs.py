"""What the tests of the codec share: whole lists of tensors through one program, and data."""

import functools

import jax
import numpy as np

from taco_jax import CODECS

# Those whose blocks have one size and one element; the others have files of their own.
PRESETS = [name for name, codec in CODECS.items() if not (codec.exact or codec.per_token or codec.mixed)]


@functools.partial(jax.jit, static_argnums=0)
def encode(codec, xs, exponent=None):
    """One program for a whole list of tensors: compiling is what these tests would spend their time on."""
    return jax.tree.map(lambda x: codec.encode(x, exponent=exponent), xs)


@functools.partial(jax.jit, static_argnums=0)
def round_trip(codec, xs, exponent=None, key=None):
    return jax.tree.map(
        lambda x: codec.decode(codec.encode(x, exponent=exponent, key=key), x.shape, x.dtype, exponent=exponent), xs
    )


def gaussian(n=1 << 17, seed=0):
    return np.random.default_rng(seed).normal(size=n).astype(np.float32)
