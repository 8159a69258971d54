"""Numbers from inside a running program: a custom call whose target is a Python function.

A module that the hook rewrites keeps the results of its program, so what is measured in it leaves by another way: a
custom call of XLA's typed FFI with one operand, uint32[n], and a result that nobody reads. `call` makes it inside of a
jitted function; `receive` says who gets the words.

The target is made with ctypes, so that nothing has to be built. Its struct layouts are those of `xla/ffi/api/c_api.h`,
whose ABI is stable within major version 0 (`jax.ffi.include_dir()` has the file). On the CPU the operand is memory. On
CUDA the target runs when the call is launched, before there are values: it enqueues a copy to pinned memory and a host
function behind it, on the program's own stream, by the driver's functions.

Exceptions must not leave a function that C has called. `problems` has them.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from taco_jax.dropin.mesh_axes import OWN_AXIS

TARGET = "taco_jax_measured"
MAJOR = 0  # of the FFI's version
METADATA = 1  # XLA_FFI_Extension_Metadata: the call asks for the target's version
EXECUTE = 3  # XLA_FFI_ExecutionStage_EXECUTE
UINT32 = 8  # of XLA's element types
STREAM_GET = 4  # the place of XLA_FFI_Stream_Get among the functions of XLA_FFI_Api
QUIET_SECONDS = 0.1
PLATFORMS = ("cpu", "gpu", "cuda")


class _Extension(ctypes.Structure):
    pass


_Extension._fields_ = [
    ("struct_size", ctypes.c_size_t), ("type", ctypes.c_int), ("next", ctypes.POINTER(_Extension))
]  # fmt: skip


class _Version(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t), ("extension", ctypes.c_void_p), ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
    ]  # fmt: skip


class _Metadata(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("version", _Version), ("traits", ctypes.c_uint32)]


class _MetadataExtension(ctypes.Structure):
    _fields_ = [("base", _Extension), ("metadata", ctypes.POINTER(_Metadata))]


class _Api(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t), ("extension", ctypes.c_void_p), ("version", _Version),
        ("internal", ctypes.c_void_p), ("functions", ctypes.c_void_p * (STREAM_GET + 1)),
    ]  # fmt: skip


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t), ("extension", ctypes.c_void_p), ("dtype", ctypes.c_int),
        ("data", ctypes.c_void_p), ("rank", ctypes.c_int64), ("dims", ctypes.POINTER(ctypes.c_int64)),
    ]  # fmt: skip


class _Arguments(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t), ("extension", ctypes.c_void_p), ("size", ctypes.c_int64),
        ("types", ctypes.POINTER(ctypes.c_int)), ("values", ctypes.POINTER(ctypes.POINTER(_Buffer))),
    ]  # fmt: skip


class _CallFrame(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t), ("extension", ctypes.POINTER(_Extension)), ("api", ctypes.POINTER(_Api)),
        ("context", ctypes.c_void_p), ("stage", ctypes.c_int), ("arguments", _Arguments),
    ]  # fmt: skip


class _StreamArguments(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t), ("extension", ctypes.c_void_p), ("context", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    ]  # fmt: skip


_HANDLER = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_CallFrame))
_STREAM_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_StreamArguments))
_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

_lock = threading.Lock()
_receivers: list[Callable[[np.ndarray], None]] = []
_problems: list[str] = []
_last_words = [-QUIET_SECONDS]  # when the last ones came


def call(words: jax.Array) -> jax.Array:
    """Hands uint32[n] to the receivers each time that it runs. Returns a value without a meaning."""
    _register()
    return jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((), jnp.float32), has_side_effect=True)(words)


def why_not(device: jax.Device) -> str | None:
    """Why numbers cannot leave programs on this kind of device, in one line; None where they can."""
    version = str(getattr(getattr(device, "client", None), "platform_version", ""))
    if device.platform in PLATFORMS and "rocm" not in version.lower():
        return None
    return f"on {device.device_kind} no values can be had from a running program; measure on CPU or NVIDIA GPUs"


def receive(receiver: Callable[[np.ndarray], None]) -> Callable[[], None]:
    """Calls `receiver` with the words of every call from now on, in threads of XLA's. Returns what ends it."""
    _register()
    with _lock:
        _receivers.append(receiver)

    def end() -> None:
        with _lock:
            _receivers.remove(receiver)

    return end


def problems() -> list[str]:
    """Why words were lost, each in one line."""
    return list(_problems)


def wait() -> None:
    """Returns when the programs that were started have run, and their words are received.

    Results that nobody keeps cannot be waited for, so an empty program over the process's devices is: it runs after
    those that were started before. On CPU that does not hold for programs of one device: so it also waits until no
    words have come for `QUIET_SECONDS`.
    """
    devices = np.array(jax.local_devices())
    mesh = Mesh(devices, (OWN_AXIS,))
    last = jax.device_put(np.zeros(devices.size), NamedSharding(mesh, PartitionSpec(OWN_AXIS)))
    jax.block_until_ready((jax.jit(jnp.negative)(last), jax.live_arrays()))
    while time.monotonic() - _last_words[0] < QUIET_SECONDS:
        time.sleep(QUIET_SECONDS / 10)


@functools.cache
def _register() -> None:
    """Registers the target, once and for good: programs that have it may run as long as the process does."""
    for platform, handler in (("cpu", _on_cpu), ("CUDA", _on_cuda)):
        jax.ffi.register_ffi_target(TARGET, _capsule(handler), platform=platform, api_version=1)


def _capsule(function) -> object:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(ctypes.cast(function, ctypes.c_void_p), None, None)


def _guarded(function):
    """`function` for a call from C: what it raises is kept, and it returns None (success)."""

    @functools.wraps(function)
    def guarded(*args):
        try:
            function(*args)
        except BaseException as error:
            _problems.append(f"{type(error).__name__}: {error}")

    return guarded


def _words(frame: _CallFrame) -> _Buffer | None:
    """The operand of a call that runs; None of a call that asks for the version, which it answers."""
    if frame.extension and frame.extension.contents.type == METADATA:
        extension = ctypes.cast(frame.extension, ctypes.POINTER(_MetadataExtension))
        version, known = extension.contents.metadata.contents.version, frame.api.contents.version
        # A newer major version may have other structs: XLA then refuses this one, by its number.
        version.major, version.minor = MAJOR, known.minor if known.major == MAJOR else 0
        return None
    if frame.stage != EXECUTE:
        return None
    buffer = frame.arguments.values[0].contents
    if frame.arguments.size != 1 or buffer.dtype != UINT32 or buffer.rank != 1:
        raise RuntimeError(f"{TARGET}: was called with other operands than uint32[n]")
    return buffer


def _deliver(address: int, size: int) -> None:
    source = ctypes.cast(address, ctypes.POINTER(ctypes.c_uint32))
    words = np.ctypeslib.as_array(source, (size,)).copy()
    _last_words[0] = time.monotonic()
    for receiver in tuple(_receivers):
        receiver(words)


@_HANDLER
@_guarded
def _on_cpu(frame) -> None:
    if (buffer := _words(frame.contents)) is not None:
        _deliver(buffer.data, buffer.dims[0])


@_HANDLER
@_guarded
def _on_cuda(frame) -> None:
    frame = frame.contents
    if (buffer := _words(frame)) is not None:
        stream = _StreamArguments(ctypes.sizeof(_StreamArguments), None, frame.context, None)
        if _STREAM_FUNCTION(frame.api.contents.functions[STREAM_GET])(ctypes.byref(stream)):
            raise RuntimeError(f"{TARGET}: XLA gives no stream")
        _cuda().copy_out(buffer.data, buffer.dims[0], stream.stream)


class _Cuda:
    """Copies from a device's stream to pinned memory, and on to the receivers."""

    def __init__(self):
        self._driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        self._lock = threading.Lock()
        self._free: dict[int, list[int]] = {}  # size -> addresses of pinned memory
        self._waiting: dict[int, tuple[int, int]] = {}  # ticket -> (address, size)
        self._tickets = 0

    def copy_out(self, device_address: int, size: int, stream: int) -> None:
        context = ctypes.c_void_p()
        self._call("cuStreamGetCtx", ctypes.c_void_p(stream), ctypes.byref(context))
        self._call("cuCtxPushCurrent_v2", context)
        try:
            address = self._pinned(size)
            with self._lock:
                self._tickets += 1
                ticket = self._tickets
                self._waiting[ticket] = (address, size)
            to, source, on = ctypes.c_void_p(address), ctypes.c_uint64(device_address), ctypes.c_void_p(stream)
            self._call("cuMemcpyDtoHAsync_v2", to, source, ctypes.c_size_t(4 * size), on)
            self._call("cuLaunchHostFunc", on, _on_copied, ctypes.c_void_p(ticket))
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(context))

    def copied(self, ticket: int) -> None:
        with self._lock:
            address, size = self._waiting.pop(ticket)
        try:
            _deliver(address, size)
        finally:
            with self._lock:
                self._free[size].append(address)

    def _pinned(self, size: int) -> int:
        with self._lock:
            if free := self._free.setdefault(size, []):
                return free.pop()
        address = ctypes.c_void_p()
        # 1: CU_MEMHOSTALLOC_PORTABLE, for all of the process's contexts.
        self._call("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(4 * size), ctypes.c_uint(1))
        return address.value

    def _call(self, name: str, *args) -> None:
        if error := getattr(self._driver, name)(*args):
            raise RuntimeError(f"{name}: the CUDA driver returns {error}")


_cuda = functools.cache(_Cuda)


@_HOST_FUNCTION
@_guarded
def _on_copied(ticket) -> None:
    _cuda().copied(ticket)
