"""What attends in a prefill: cuDNN where it can, which holds no scores of all pairs of positions, else XLA."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_helpers import QWEN2, Run

from taco_jax.config import TrainConfig
from taco_jax.inference.forward import prefill
from taco_jax.inference.settings import Settings
from taco_jax.models.presets import preset

QWEN7B = preset("qwen2p5_7b")


def gpu(kind: str, capability: str | None) -> SimpleNamespace:
    return SimpleNamespace(platform="gpu", device_kind=kind, compute_capability=capability)


H200, V100 = gpu("NVIDIA H200", "9.0"), gpu("Tesla V100-SXM2-16GB", "7.0")
AMD = gpu("AMD Instinct MI300X", "gfx942")
CPU = SimpleNamespace(platform="cpu", device_kind="cpu")


@pytest.mark.parametrize(
    "device,dtype,head_dim,expected",
    [
        (H200, "bfloat16", 128, "cudnn"),
        (H200, "float16", 64, "cudnn"),
        (gpu("NVIDIA A100-SXM4-80GB", "8.0"), "bfloat16", 128, "cudnn"),
        (H200, "float32", 128, "xla"),
        (H200, "bfloat16", 12, "xla"),
        (H200, "bfloat16", 192, "xla"),
        (V100, "float16", 128, "xla"),
        (AMD, "bfloat16", 128, "xla"),
        (CPU, "bfloat16", 128, "xla"),
    ],
)
def test_the_device_decides(device, dtype, head_dim, expected):
    config = dataclasses.replace(QWEN7B, head_dim=head_dim)
    layout = Settings(4, dtype=dtype).layout(config, device, decoding=False)
    assert layout.par.attention_implementation == expected


def test_the_trainer_decides_alike():
    from taco_jax.train import step

    config = TrainConfig(model=QWEN7B, compute_dtype="bfloat16")
    mesh = lambda device: SimpleNamespace(devices=np.array([device]))
    assert [step._attention(config, mesh(device)) for device in (H200, V100, CPU)] == ["cudnn", "xla", "xla"]


@pytest.mark.parametrize("device", [H200, CPU])
def test_the_choice_reaches_the_call(device, monkeypatch):
    run, asked = Run(QWEN2, tp=2), []
    attend = jax.nn.dot_product_attention

    def record(*args, implementation=None, **options):
        asked.append((implementation, options))
        return attend(*args, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", record)
    monkeypatch.setattr("taco_jax.compression.tuned.region_device", lambda: jax.devices()[0])
    layout = Settings(2, dtype="bfloat16").layout(QWEN2, device, decoding=False)
    f = lambda p, t, n: prefill(p, t, n, 16, QWEN2, layout)[0]
    mapped = jax.shard_map(f, mesh=run.mesh, in_specs=(run.specs, None, None), out_specs=jax.sharding.PartitionSpec())
    jax.eval_shape(mapped, run.params(), jnp.zeros((2, 16), jnp.int32), jnp.array([3, 16]))
    expected = "xla" if device is CPU else "cudnn"
    assert asked and {name for name, _ in asked} == {expected} and asked[0][1] == {"is_causal": True}
