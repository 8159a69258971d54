"""Compiles for an H100 on a machine without a GPU. Run by `.ci/aot`, in an environment of its own: the extra `aot`.

Elsewhere these tests skip themselves. The variables must be set before jax is imported.
"""

import importlib.util
import os
import pathlib

import pytest

PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
PLUGIN = next((name for name in PLUGINS if importlib.util.find_spec(name)), None)
ENABLED = os.environ.get("TACO_TEST_AOT") == "1" and PLUGIN is not None

if ENABLED:
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # no driver, cuBLAS or cuDNN
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"  # registers and spills on stdout
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # what comes from a cache was not compiled
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "0"
    folder = "nvidia/cu13/bin" if PLUGIN == PLUGINS[0] else "nvidia/cuda_nvcc/bin"
    packages = pathlib.Path(importlib.util.find_spec("jax").origin).parent.parent
    os.environ["PATH"] = f"{packages / folder}{os.pathsep}{os.environ['PATH']}"  # ptxas


def pytest_collection_modifyitems(items):
    if not ENABLED:
        skip = pytest.mark.skip(reason="compiles for CUDA without a GPU: run .ci/aot, which sets TACO_TEST_AOT=1")
        for item in items:
            if pathlib.Path(__file__).parent in item.path.parents:
                item.add_marker(skip)
