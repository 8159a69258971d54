"""CompressedDense for Flax Linen: `from taco_jax.linen import CompressedDense`. The NNX twin is in `nnx.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from taco_jax.codec import Codec
from taco_jax.compression.compression import Compression
from taco_jax.compression.site_scales import SLOT_NAME, SiteScales, new_scale_state
from taco_jax.nn import dense

SITE_SCALE = "site_scale"


class CompressedDense(nn.Module):
    """A dense layer whose features are split over a mesh axis and whose messages are compressed.

        y[..., out_features] = x[..., in_features] kernel[in_features, out_features] + bias[out_features]

    All is as in `taco_jax.CompressedDense`, whose docstring explains the arguments; in_features is that of x and the
    site is named by the module's path. What differs:

    * `init` needs no mesh and takes any batch size: it computes the same equation without communication.
    * Beside "params" there are the collections "site_scale" (`exponents` int32[2] and `history` float32[2, H], read
      only) and "_overwrite_with_gradient" (`amax_slot`, zeros float32[2, 1], whose gradient is the largest block scale
      on any device). Exact layers have neither. `taco_jax.update_scales(variables["site_scale"], gradients)`, with the
      gradients of the second, is the next step's "site_scale". `apply({"params": params}, x)` does without them,
      uncalibrated. Differentiate collections by name: the exponents are integers.
    * Inside a shard_map give the unboxed variables `in_specs=nn.get_partition_spec(variables)`.
    * Under `nn.scan` every collection has a layer dim: `variable_axes={"params": 0, "site_scale": 0,
      "_overwrite_with_gradient": 0}, metadata_params={nn.PARTITION_NAME: None}`.
    """

    out_features: int
    kind: str = "column"
    axis: str = "tp"
    compression: str | Codec | Compression | None = None
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Callable = nn.initializers.lecun_normal()
    bias_init: Callable = nn.initializers.zeros_init()
    mesh: Any = None
    batch_axes: Any = None
    sequence_dim: int | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layer = dense.Dense(
            kind=self.kind, axis=self.axis, compression=self.compression, dtype=self.dtype, precision=self.precision,
            mesh=self.mesh, batch_axes=self.batch_axes, sequence_dim=self.sequence_dim, site="/".join(self.path),
        )  # fmt: skip
        shape = x.shape[-1], self.out_features
        dense.check_sizes(*shape)
        if dense.in_region():
            shape = dense.local_shape(layer, *shape, initializing=self.is_initializing())
        kernel = self._parameter("kernel", self.kernel_init, shape, layer.kernel_names)
        bias = self._parameter("bias", self.bias_init, shape[1:], layer.bias_names) if self.use_bias else None
        exponents = slot = None
        if layer.compression is not None:
            new = new_scale_state()
            exponents = self._site_state(SITE_SCALE, "exponents", new.exponents)
            self._site_state(SITE_SCALE, "history", new.history)
            slot = self._site_state(OVERWRITE_WITH_GRADIENT, SLOT_NAME, jnp.zeros((2, 1), jnp.float32))
        if self.is_initializing():
            return dense.apply_unsharded(layer, x, kernel, bias)
        return dense.apply(layer, x, kernel, bias, SiteScales(exponents, slot))

    def _parameter(self, name, init, shape, names):
        mesh = self.mesh if dense.can_constrain(self.mesh) else None

        def boxed(*arguments):
            value = init(*arguments)
            # A box of the user's own initializer wins: parameters cut over more axes.
            return value if isinstance(value, nn.meta.AxisMetadata) else nn.Partitioned(value, names, mesh)

        value = self.param(name, boxed, shape, self.param_dtype, unbox=False)
        # Without the constraint, which Explicit axes take as an assertion: the shard_map places the value.
        return value.unbox(apply_constraint=False) if isinstance(value, nn.Partitioned) else nn.unbox(value)

    def _site_state(self, collection, name, value):
        if not (self.is_initializing() or self.has_variable(collection, name)):
            return None
        return self.variable(collection, name, lambda: dense.place_whole(jnp.asarray(value), self.mesh)).value
