"""The forecast's count of memory traffic is XLA's: bytes and kernels of training steps, as compiled for H100s."""

import dataclasses

import pytest
from aot.topology import devices
from aot.traffic import traffic

from taco_jax.config import CompressionConfig, DataConfig, MeshConfig, TrainConfig
from taco_jax.config.checks import check
from taco_jax.forecast import hardware, links, predict
from taco_jax.forecast.cost import Machine
from taco_jax.mesh import make_mesh
from taco_jax.models.presets import preset
from taco_jax.train import step as step_lib


def config(name: str, remat: str, layers: int = 3, **changes) -> TrainConfig:
    model = dataclasses.replace(preset(name), n_layers=layers, vocab_size=8192)
    shape = {"data": DataConfig(sequence_length=1024), "mesh": MeshConfig(tp=2), "global_batch": 16}
    exact = {"compression": CompressionConfig("none", "none"), "sequence_parallel": False}
    return TrainConfig(model=model, remat=remat, **shape | exact | changes)


@pytest.fixture
def no_cudnn(monkeypatch):
    """Lowers cuDNN's attention without cuDNN: nothing runs."""
    from jax._src.cudnn import fused_attention_stablehlo as attention

    monkeypatch.setattr(attention, "check_cudnn_version", lambda: 91200)
    monkeypatch.setattr(attention, "check_compute_capability", lambda capability: True)


@pytest.mark.parametrize(
    "name, remat, changes",
    [
        ("gpt2_124m", "dots", {}),
        ("gpt2_124m", "none", {"accumulation": 2}),
        ("qwen2p5_7b", "full", {}),
        ("qwen2p5_7b", "none", {}),
        ("qwen2p5_7b", "full", {"chains": 2}),
    ],
)
def test_bytes_and_kernels_of_a_step(name, remat, changes, no_cudnn, monkeypatch):
    compared = check(config(name, remat, **changes))
    mesh = make_mesh(1, 1, 2, list(devices(2)))
    nbytes, kernels = traffic(step_lib.build(compared, mesh).lowered.compile().as_text())
    counted, add = [], predict.Timer.work

    def counting(timer, items, times=1.0):
        items = list(items)
        counted.extend((item, times) for item in items)
        add(timer, items, times)

    monkeypatch.setattr(predict.Timer, "work", counting)
    gpu = hardware.gpu("H100")
    predict.step(compared, Machine(gpu, links.parse("nvlink", gpu), 2), "free")
    moved = [(w, times * w.count) for w, times in counted if w.kind not in ("product", "attention")]
    assert sum(times * w.bytes for w, times in moved) == pytest.approx(nbytes, rel=0.1)
    assert sum(times * w.kernels for w, times in moved) == pytest.approx(kernels, rel=0.12)
