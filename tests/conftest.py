"""Set-up that must come before jax is imported, and the fixtures that every test may use.

Tests run on 8 emulated CPU devices. With TACO_TEST_GPU=1 they run on the machine's own GPUs: use it with `-m gpu`.
"""

import gc
import os
import shutil
import sys
import tempfile

import pytest

GPU = os.environ.get("TACO_TEST_GPU") == "1"

if "jax" in sys.modules:
    raise RuntimeError("jax was imported before tests/conftest.py could set XLA_FLAGS; does a pytest plugin do it?")
# Most of the tests' time would go into LLVM's optimising of small programs that run once or twice. XLA's own passes,
# and with them the messages that tests read in compiled HLO, are the same without; `helpers.QUICK_COMPILING` is more
# that is left out. Tests of values that may depend on how loops are vectorised take the fixture `optimised`;
# `.ci/nightly` runs all tests with JAX_DISABLE_MOST_OPTIMIZATIONS=0, as users compile.
if not GPU:
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    from helpers import cpu_environment

    os.environ.update(cpu_environment(devices=8))

# What was tuned on this machine is no part of a test.
os.environ["TACO_JAX_TUNED"] = ""

# Test processes, and the programs that tests start, compile many of the same steps: they share one cache for this run,
# made by the first process and inherited by the others. On CPU a cached program repeats the bits of a fresh one, and
# its compiled HLO reads the same. Set JAX_COMPILATION_CACHE_DIR to keep a cache from run to run.
CACHE = None
if not GPU and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    CACHE = tempfile.mkdtemp(prefix="taco_jax_test_cache_")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = CACHE
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"


# Each test process has a core to itself, at most. XLA makes its pools of threads by this variable, and compiling in one
# thread takes a twentieth less CPU time than in several that share a core.
if not GPU:
    os.environ.setdefault("NPROC", "1")


def pytest_collection_finish():
    """Most objects live to the end, or till their module's tests are over: Python need not look for garbage so often,
    which took a twentieth of the CPU time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def pytest_unconfigure():
    if CACHE is not None:
        shutil.rmtree(CACHE, ignore_errors=True)


# The drop-in's files come first: the hook looks through all programs that its process has loaded, few at that time.
# Files that take longest for their number of tests follow, so that both processes have work to the end.
FIRST = (
    "test_hook.py", "test_operations.py", "test_values.py", "test_combined_sums.py", "test_fewer_messages.py",
    "test_train.py", "test_distributed.py", "test_step.py", "test_triton_interpreter.py", "test_mosaic_interpreter.py",
    "test_codec_values.py", "test_own_text.py", "test_init_from.py", "test_readme.py", "test_layers.py",
    "test_export.py", "test_export_features.py", "test_decoder.py", "test_data_parallel_step.py", "test_pipeline.py",
    "test_pipeline_train.py", "test_triton_lowering.py", "test_mosaic_lowering.py", "test_generator.py",
    "test_hierarchical.py", "test_dot.py", "test_optimizers.py", "test_dry_run.py", "test_serve_command.py",
    "test_lora.py", "test_lora_runs.py", "test_overlap.py", "test_masks.py", "test_remat.py", "test_projections.py",
)  # fmt: skip


def pytest_configure(config):
    if hasattr(config.option, "loadscopereorder"):  # pytest-xdist's own order is by the number of a file's tests
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: FIRST.index(item.path.name) if item.path.name in FIRST else len(FIRST))
    skip = pytest.mark.skip(reason="needs NVIDIA GPUs: run on a machine that has some, with TACO_TEST_GPU=1")
    for item in items:
        if "gpu" in item.keywords and not GPU:
            item.add_marker(skip)


@pytest.fixture(scope="module")
def optimised():
    """For modules whose values may depend on how loops are vectorised: they compile as users do."""
    from unittest import mock

    import jax
    from jax._src import compiler

    name, get_options = "jax_disable_most_optimizations", compiler.get_compile_options
    before = jax.config.values[name]

    def as_users(*args, **settings):
        options = get_options(*args, **settings)
        options.env_option_overrides = [*options.env_option_overrides, ("xla_backend_extra_options", "")]
        return options

    jax.config.update(name, False)
    jax.clear_caches()  # of operations without jit too
    with mock.patch.object(compiler, "get_compile_options", as_users):
        yield
    jax.config.update(name, before)
    jax.clear_caches()


@pytest.fixture(scope="session")
def make_mesh():
    """make_mesh(dp=1, pp=1, tp=1): see `helpers.make_mesh`."""
    from helpers import make_mesh

    return make_mesh


@pytest.fixture
def run_python(tmp_path):
    """run_python(code_or_argv, devices=8, ...): a fresh process in the test's own folder; see `helpers.run_python`."""
    from helpers import run_python

    def run(code_or_argv, **options):
        return run_python(code_or_argv, **{"cwd": tmp_path, **options})

    return run


@pytest.fixture(scope="session")
def repository():
    """Path of the repository's root, for tests that read the README or run an experiment file."""
    from helpers import REPOSITORY

    return REPOSITORY
