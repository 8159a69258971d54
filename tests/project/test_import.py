"""`import taco_jax` starts no backend, sets no flag and prints nothing; nor does any of our modules."""

# jax lets the number of CPU devices be set only while no backend has started, so the last lines show that none has.
TEMPLATE = """
import os
import jax
{before}
environment, flags = dict(os.environ), dict(jax.config.values)
{imports}
changed = {{k: os.environ.get(k) for k in {{*os.environ, *environment}} if os.environ.get(k) != environment.get(k)}}
changed |= {{k: v for k, v in jax.config.values.items() if k in flags and flags[k] != v}}
assert not changed, changed
jax.config.update("jax_num_cpu_devices", 3)
assert len(jax.devices()) == 3
"""

EVERY_MODULE = """
import importlib, pkgutil, taco_jax, pallas_kernels
for package in (taco_jax, pallas_kernels):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if error.name != "triton":  # an extra
                    raise
"""

# Not inherited from the tests' own set-up: a user's flag that must survive.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_enable_fast_math=false"}


def test_import_is_quiet(run_python):
    code = TEMPLATE.format(before="", imports="import taco_jax")
    result = run_python(code, devices=None, env=ENVIRONMENT)
    assert (result.stdout, result.stderr) == ("", "")


def test_no_module_starts_a_backend_or_sets_a_flag(run_python):
    # jax itself sets MOSAIC_GPU_CUDA_ROOT when its Mosaic GPU is imported, which only our kernels do.
    before = "import jax.experimental.pallas.mosaic_gpu"
    code = TEMPLATE.format(before=before, imports=EVERY_MODULE)
    result = run_python(code, devices=None, env=ENVIRONMENT)
    assert result.stdout == ""


def test_the_modules_that_help_names_need_no_import_of_their_own(run_python):
    names = "linen.CompressedDense, tensor_parallel.REMAT_NAMES, CompressedDense, AmaxSlot, SiteScaleState"
    forget = "import sys; [sys.modules.pop(name) for name in list(sys.modules) if name.startswith('taco_jax')]"
    star = "from taco_jax import *; CompressedDense, psum, CODECS"
    run_python("\n".join(["import taco_jax", *(f"taco_jax.{name}" for name in names.split(", ")), forget, star]))
