"""The one file of the hook that knows `jax.extend.xla` and what jax does not promise: jax 0.10.2 to 0.12."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator

import jax

NAME = "taco_jax"
FIRST = "0.10.2"  # the first jax with transformations of modules
# XLA of jax 0.10 forgets which arguments are donated when a module is transformed.
KEEPS_DONATION = jax.__version_info__ >= (0, 11)
LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"  # jax.monitoring's name of the event before compiling
COMPILED = "/jax/core/compile/backend_compile_duration"  # and of those around it, or around loading from a cache
CACHE_HIT = "/jax/compilation_cache/cache_hits"


class MissingHookError(RuntimeError):
    """This jax, or its plugin, cannot hand its programs over. One line."""


def transformations():
    """`jax.extend.xla`. Raises MissingHookError with the version that has it."""
    try:
        from jax.extend import xla
    except ImportError:
        xla = None
    if not hasattr(xla, "register_hlo_module_transformation"):
        raise MissingHookError(
            f"jax {jax.__version__} has no jax.extend.xla.register_hlo_module_transformation, which the drop-in needs; "
            f"install jax {FIRST} or newer, or compress layer by layer (taco_jax.CompressedDense)"
        )
    return xla


def register(callback: Callable[[bytes], bytes | None]) -> None:
    """Hands every module that is compiled from now on to `callback`, on all platforms. May start the backends."""
    try:
        transformations().register_hlo_module_transformation(callback, name=NAME)
    except NotImplementedError as error:
        raise MissingHookError(f"jaxlib {jax.lib.__version__}: {error}; install jax {FIRST} or newer") from None


def unregister() -> None:
    transformations().clear_hlo_module_transformation(NAME)


@functools.cache
def context():
    """The value that JAX's caches of programs take into account: in a thread (`context()(value)`) or in all of them
    (`context().set_global(value)`). Made when it is first needed."""
    return jax.make_user_context(None)


@contextlib.contextmanager
def listening(
    on_lowered: Callable[[str], None],
    on_compiling: Callable[[str], None],
    on_cache_hit: Callable[[], None],
    on_compiled: Callable[[], None],
) -> Iterator[None]:
    """Calls `on_lowered` with the name of a program that is lowered, `on_compiling` with it before it is compiled,
    `on_cache_hit` where the persistent cache has it, and `on_compiled` once it is there, in the thread that asked."""

    def begins(event: str, time: float, *, fun_name: str = "", **_) -> None:
        if event == COMPILED:
            on_compiling(fun_name)

    def duration(event: str, seconds: float, *, fun_name: str = "", **_) -> None:
        if event == LOWERED:
            on_lowered(fun_name)
        elif event == COMPILED:
            on_compiled()

    def hit(event: str, **_) -> None:
        if event == CACHE_HIT:
            on_cache_hit()

    jax.monitoring.register_event_duration_secs_listener(duration)
    jax.monitoring.register_event_listener(hit)
    jax.monitoring.register_scalar_listener(begins)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(duration)
        jax.monitoring.unregister_event_listener(hit)
        jax.monitoring.unregister_scalar_listener(begins)


@contextlib.contextmanager
def in_cache_key(addition: Callable[[], str]) -> Iterator[None]:
    """Makes `addition()`, called in the compiling thread, part of the keys of the persistent compilation cache.

    An empty addition leaves a key as it is. jax has a function for it, `custom_hook`, that it calls for every key.
    """
    from jax._src import cache_key

    before = getattr(cache_key, "custom_hook", None)
    if before is None:
        if jax.config.jax_compilation_cache_dir:
            raise MissingHookError(
                f"jax {jax.__version__}: the persistent compilation cache would mix programs with and without "
                "compression; set jax_compilation_cache_dir to None"
            )
        yield
        return
    cache_key.custom_hook = lambda: before() + addition()
    try:
        yield
    finally:
        cache_key.custom_hook = before


def compiling_threads(name: str) -> list[int]:
    """Identifiers of the threads that may have asked for the module `name` which a callback has been handed.

    jax 0.11 calls back in the thread that compiles. jax 0.10 does so in one of XLA's own: then the threads that wait
    inside of jax's compiler, those that compile a module of that name where any does.
    """
    own = threading.get_ident()
    frames = sys._current_frames()
    waiting = {thread: module for thread, frame in frames.items() if (module := _compiles(frame)) is not None}
    if own in waiting:
        return [own]
    named = [thread for thread, module in waiting.items() if module == name]
    return named or list(waiting)


def _compiles(frame) -> str | None:
    """The name of the module that a thread compiles, "" where it is not known, None where it compiles nothing."""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith("jax/_src/compiler.py") and code.co_name == "backend_compile_and_load":
            return frame.f_locals.get("module_name", "")
        frame = frame.f_back
    return None


def loaded_modules(seen: set[bytes]) -> Iterator[bytes]:
    """The modules of all programs that this process has loaded, serialized, but of those whose fingerprint is `seen`.

    Adds the fingerprints of those that it gives.
    """
    clients = {id(device.client): device.client for device in jax.local_devices()}
    for client in clients.values():
        for executable in client.live_executables():
            if (fingerprint := executable.fingerprint) in seen:
                continue
            if fingerprint is not None:
                seen.add(fingerprint)
            for module in executable.hlo_modules():
                yield module.as_serialized_hlo_module_proto()
