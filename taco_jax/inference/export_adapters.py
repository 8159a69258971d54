"""A run's adapters as PEFT's folder: `adapter_config.json`, `adapter_model.safetensors`.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight      [rank, in], our A transposed
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight      [out, rank], our B transposed

Where several of our matrices are one of Hugging Face's (GPT-2's c_attn), their adapters are one of the sum of their
ranks: A's side by side, B's on the diagonal. Its alpha is as many times ours, so that alpha / rank is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from taco_jax.config import ConfigError
from taco_jax.inference.run_folder import RunFolder
from taco_jax.inference.tensors import finite, not_finite
from taco_jax.models import huggingface

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


def tensors(run: RunFolder, dtype: np.dtype) -> dict[str, np.ndarray]:
    """Returns {PEFT's name: array} of all adapters. Raises ConfigError for one that is not finite in that type."""
    found = {}
    for target, adapted in _adapted(run):
        arrays = [tuple(map(np.asarray, run.adapter(name))) if name in adapted else None for name in _ours(target)]
        widths = [run.shape(path)[-1] for path in target.ours]
        for layer, name in enumerate(target.names):
            a, b = _joined([None if pair is None else (pair[0][layer], pair[1][layer]) for pair in arrays], widths)
            module = _PREFIX + name.removesuffix(".weight")
            for part, array in (("lora_A", a.T), ("lora_B", b.T)):
                with np.errstate(over="ignore"):
                    cast = np.array(array, dtype, order="C")
                if not finite(cast):
                    raise ConfigError(f"{run}: the tensor {name!r} {not_finite(np.asarray(array), dtype)}")
                found[f"{module}.{part}.weight"] = cast
    return found


def described(run: RunFolder, base: str | None) -> dict[str, Any]:
    """Returns the content of adapter_config.json. base: folder of the model that the adapters belong to, if one is."""
    adapters, targets = run.adapters, list(_adapted(run))
    rest = [target for target in huggingface.targets(run.config) if target not in [t for t, _ in targets]]
    others = {_module(target, 1) for target in rest}
    modules = {target: _module(target, 2 if _module(target, 1) in others else 1) for target, _ in targets}
    repeated = [name for name in modules.values() if list(modules.values()).count(name) > 1]
    modules = {target: _module(target, 2) if name in repeated else name for target, name in modules.items()}
    several = {modules[target]: len(adapted) for target, adapted in targets if len(adapted) > 1}
    alpha = adapters.scale * adapters.rank
    alpha = int(alpha) if alpha == int(alpha) else alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(modules.values()),
        "rank_pattern": {name: n * adapters.rank for name, n in several.items()},
        "alpha_pattern": {name: n * alpha for name, n in several.items()},
        "bias": "none",
        "fan_in_fan_out": not all(target.out_in for target, _ in targets),
        "init_lora_weights": True,
        "inference_mode": True,
    }


def base_of(source: Mapping[str, Any]) -> str | None:
    """Returns the folder of the model that training started from, of what a run keeps of it (`source.json`); None where
    that was no folder of Hugging Face's."""
    return source.get("from") if source.get("kind") == "Hugging Face" else None


def _ours(target: huggingface.Target) -> list[str]:
    """Our names of the target's matrices: attn/q of layers/attn/q/kernel."""
    return [path.removeprefix("layers/").removesuffix("/kernel") for path in target.ours]


def _adapted(run: RunFolder) -> Iterator[tuple[huggingface.Target, list[str]]]:
    """Yields Hugging Face's matrices that have adapters, with our names of those parts that have."""
    for target in huggingface.targets(run.config):
        if adapted := [name for name in _ours(target) if name in run.adapters.targets]:
            yield target, adapted


def _module(target: huggingface.Target, parts: int) -> str:
    """The last parts of a module's name, the same in all layers."""
    return ".".join(target.names[0].removesuffix(".weight").split(".")[-parts:])


def _joined(pairs: list[tuple[np.ndarray, np.ndarray] | None], widths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """(A, B) of matrices side by side, of which some have adapters."""
    a = np.concatenate([pair[0] for pair in pairs if pair is not None], axis=1)
    b = np.zeros((a.shape[1], sum(widths)), np.float32)
    row = column = 0
    for pair, width in zip(pairs, widths):
        if pair is not None:
            b[row : row + len(pair[1]), column : column + width] = pair[1]
            row += len(pair[1])
        column += width
    return a, b
