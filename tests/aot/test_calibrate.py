"""A measured program, as XLA compiles it for H100s: the exact collectives, and beside each a call to the host."""

import jax
import jax.numpy as jnp
from aot.instructions import collectives
from aot.test_dropin import array, for_cuda, mesh  # noqa: F401
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from taco_jax.dropin import calibrate, host_calls

WIDTH, HIDDEN, TOKENS, LAYERS = 1024, 4096, 2048, 3


def test_a_stack_of_layers():
    on = mesh(data=1, tensor=4)

    def layer(x, w):
        y = jax.nn.gelu(x @ w[0]) @ w[1]
        return x + jax.lax.with_sharding_constraint(y, NamedSharding(on, P("data", None))), None

    loss = lambda ws, x: (jax.lax.scan(layer, x, ws)[0].astype(jnp.float32) ** 2).mean()
    f = jax.jit(jax.grad(loss, argnums=(0, 1)))
    ws = (
        array(on, (LAYERS, WIDTH, HIDDEN), None, None, "tensor"),
        array(on, (LAYERS, HIDDEN, WIDTH), None, "tensor", None),
    )
    compile = lambda: f.trace(ws, array(on, (TOKENS, WIDTH))).lower(lowering_platforms=("cuda",)).compile()
    exact = compile()
    calibration = calibrate.Calibration(*calibrate.checked(bits=5))
    try:
        measured = compile()
    finally:
        calibration.stop()
    sites = [site for program in calibration._history.programs() for site in program.sites if not site.reason]
    assert sorted((site.operation, site.direction, site.dtype, site.runs) for site in sites) == [
        ("all_reduce", "backward", "bfloat16", LAYERS), ("all_reduce", "forward", "bfloat16", LAYERS)
    ]  # fmt: skip
    assert sorted(collectives(measured)) == sorted(collectives(exact))
    calls = [line for line in measured.as_text().splitlines() if f'custom_call_target="{host_calls.TARGET}"' in line]
    assert len(calls) == len(sites)
    assert all("custom_call_has_side_effect=true" in line and "API_VERSION_TYPED_FFI" in line for line in calls)
