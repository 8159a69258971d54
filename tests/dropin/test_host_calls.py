"""How numbers leave a compiled program: on the CPU, and by a model of the CUDA driver."""

import ctypes
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from taco_jax.dropin import host_calls

pytestmark = pytest.mark.usefixtures("nothing_stays_in_force")


def test_what_a_receiver_raises_stays_inside():
    problems = len(host_calls.problems())
    found = []
    ends = [host_calls.receive(lambda words: 1 / 0), host_calls.receive(found.append)]
    f = jax.jit(lambda x: (host_calls.call(x.astype(jnp.uint32)), x + 1)[1])
    try:
        y = f(jnp.arange(5))
        host_calls.wait()
    finally:
        for end in ends:
            end()
    assert y.tolist() == [1, 2, 3, 4, 5] and not found
    assert host_calls.problems()[problems:] == ["ZeroDivisionError: division by zero"]
    f(jnp.arange(3)).block_until_ready()
    assert len(host_calls.problems()) == problems + 1


class Driver:
    """The functions of libcuda that are called, on memory of the host, with a thread for each stream's work."""

    def __init__(self):
        self.contexts, self.pinned, self.queue = [], [], []

    def cuStreamGetCtx(self, stream, context):
        context._obj.value = stream.value + 1
        return 0

    def cuCtxPushCurrent_v2(self, context):
        self.contexts.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, context):
        self.contexts.pop()
        return 0

    def cuMemHostAlloc(self, address, size, flags):
        assert self.contexts == [78] and flags.value == 1
        self.pinned.append(ctypes.create_string_buffer(size.value))
        address._obj.value = ctypes.addressof(self.pinned[-1])
        return 0

    def cuMemcpyDtoHAsync_v2(self, to, source, size, stream):
        assert stream.value == 77
        self.queue.append(lambda: ctypes.memmove(to.value, source.value, size.value))
        return 0

    def cuLaunchHostFunc(self, stream, function, data):
        self.queue.append(lambda: function(data))
        return 0

    def run(self):
        """The stream gets to what it was given."""
        queue, self.queue = self.queue, []
        thread = threading.Thread(target=lambda: [work() for work in queue])
        thread.start()
        thread.join()


def frame_of(words, get_stream):
    """(a call's frame as XLA makes it for uint32 words, what must outlive it)."""
    dims = (ctypes.c_int64 * 1)(len(words))
    buffer = host_calls._Buffer(0, None, host_calls.UINT32, words.ctypes.data, 1, dims)
    values = (ctypes.POINTER(host_calls._Buffer) * 1)(ctypes.pointer(buffer))
    api = host_calls._Api()
    api.functions[host_calls.STREAM_GET] = ctypes.cast(get_stream, ctypes.c_void_p).value
    frame = host_calls._CallFrame(api=ctypes.pointer(api), context=5, stage=host_calls.EXECUTE)
    frame.arguments.size, frame.arguments.values = 1, values
    return frame, (dims, buffer, values, api)


def test_words_come_from_a_gpu_once_its_stream_gets_there(monkeypatch):
    """The values are not there yet when a call is launched; pinned memory is used again."""

    @host_calls._STREAM_FUNCTION
    def get_stream(arguments):
        assert arguments.contents.context == 5
        arguments.contents.stream = 77
        return None

    cuda = host_calls._Cuda.__new__(host_calls._Cuda)
    monkeypatch.setattr(host_calls.ctypes, "CDLL", lambda name: Driver())
    cuda.__init__()
    monkeypatch.setattr(host_calls, "_cuda", lambda: cuda)
    found, problems = [], len(host_calls.problems())
    end = host_calls.receive(found.append)
    try:
        for value in (3, 4):
            words = np.zeros(6, np.uint32)
            frame, kept = frame_of(words, get_stream)
            assert host_calls._on_cuda(ctypes.byref(frame)) is None
            words[:] = value
            assert len(found) == value - 3
            cuda._driver.run()
            assert found[-1].tolist() == 6 * [value] and kept
        assert len(cuda._driver.pinned) == 1 and not cuda._driver.contexts and not cuda._waiting
        assert len(host_calls.problems()) == problems
        cuda._driver.cuMemcpyDtoHAsync_v2 = lambda *args: 700
        assert host_calls._on_cuda(ctypes.byref(frame)) is None
        assert host_calls.problems()[problems:] == ["RuntimeError: cuMemcpyDtoHAsync_v2: the CUDA driver returns 700"]
    finally:
        end()
