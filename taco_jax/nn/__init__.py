"""Layers: nnx, linen: `CompressedDense` for Flax. dense: what they share. tensor_parallel: the same inside a manual
region. vocab_parallel: embedding and loss over a split vocabulary. Import `taco_jax.linen` and
`taco_jax.tensor_parallel`."""
