"""CompressedDense for Flax Linen: `from taco_jax.linen import CompressedDense`. The NNX twin is
`taco_jax.CompressedDense`."""

from taco_jax.nn.linen import CompressedDense

__all__ = ["CompressedDense"]
