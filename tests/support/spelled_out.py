"""The collectives with the fields of `Compression` as keywords of their own, `forward` as `codec`: tests vary them."""

import dataclasses
import functools

import taco_jax
from taco_jax import Compression

# Messages of every size, in one piece, whatever is tuned.
every_size = functools.partial(Compression, min_bytes=0, chunks=1)
FIELDS = {field.name for field in dataclasses.fields(Compression)}


def spelled_out(collective):
    @functools.wraps(collective)
    def call(*args, codec="taco", **kwargs):
        fields = {key: kwargs.pop(key) for key in FIELDS.intersection(kwargs)}
        return collective(*args, compression=every_size(codec, **fields), **kwargs)

    return call


psum, psum_scatter, all_gather = map(spelled_out, (taco_jax.psum, taco_jax.psum_scatter, taco_jax.all_gather))
all_to_all, ppermute, copy = map(spelled_out, (taco_jax.all_to_all, taco_jax.ppermute, taco_jax.copy))
psum_with_feedback = spelled_out(taco_jax.psum_with_feedback)
