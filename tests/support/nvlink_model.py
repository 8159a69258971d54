"""A model of GPUs that run a kernel of `pallas_kernels.nvlink`: the kernel's own body, without jax and without values.

What a warp does depends on its rank, CTA and role alone. So the body runs once for each of them and records operations:
waits, copies, signals. `NVLinkModel` then carries them out, one at a time, on numpy arrays in the place of memories.

Copies are asynchronous: each reads, and writes, at some time between its start and the wait for its end. `timing` says
when: "early", as it starts; "late", where it leaves shared memory, when no warp can go on without; "random". Memory
starts as NaN.

A row of a tile is one number. Twice its value stands for its rotation, and a frame has the codes and the scales of 64
rows. The model has no proxies' caches; it checks instead that fences stand where they are needed.
"""

import collections
import functools
import itertools
import random
from types import SimpleNamespace

import numpy as np

from pallas_kernels.mosaic import tiling
from pallas_kernels.mosaic.tiling import TILE_ROWS
from pallas_kernels.nvlink import collective, frame_transport, tile_schedule, warp_roles

WARPS = 4  # of a warpgroup
ROTATION = np.float32(2)


def split(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (codes, scales) of rotated values: four bits of each."""
    mantissa, exponent = np.frexp(z)
    return np.round(mantissa * 16), np.ldexp(np.float32(1), exponent - 4)


class Registers:
    """Values float32[64] of a warpgroup; what they are is computed when it is asked for first."""

    __array_ufunc__ = None

    def __init__(self, function):
        self._function, self._values = function, None

    @property
    def values(self) -> np.ndarray:
        self.compute()
        return self._values

    def compute(self) -> None:
        if self._values is None:
            self._values = self._function()

    def __add__(self, other):
        return Registers(lambda: self.values + other.values)

    def __mul__(self, other):
        return Registers(lambda: self.values * other.values)

    def astype(self, dtype):
        return self


class Counter:
    """A barrier, with how many of its completions were waited for, or a semaphore, with the most that was asked."""

    def __init__(self):
        self.count = self.seen = self.asked = 0
        self.waiters = []


class Type:
    """The type of a memory. counters: of barriers or semaphores."""

    def __init__(self, shape, dtype=np.float32, *, counters=False):
        self.shape, self.dtype, self.counters = tuple(shape), dtype, counters

    def make(self) -> np.ndarray:
        if not self.counters:
            return np.full(self.shape, np.nan, self.dtype)
        array = np.empty(self.shape, object)
        array.reshape(-1)[:] = [Counter() for _ in range(array.size)]
        return array


class Ref:
    """A part of a memory that every rank, or every CTA of every rank, has.

    arrays: {rank: array}. writes: alike, how often each element was written; None where that is of no interest.
    """

    def __init__(self, arrays, writes=None, *, rank, index=()):
        self.arrays, self.writes, self.rank, self.index = arrays, writes, rank, index

    at = property(lambda self: self)  # which takes an index alike

    def __getitem__(self, index):
        index = index if isinstance(index, tuple) else (index,)
        return Ref(self.arrays, self.writes, rank=self.rank, index=(*self.index, index))

    @functools.cached_property
    def array(self) -> np.ndarray:
        return self._part(self.arrays)

    @property
    def counter(self) -> Counter:
        return self.array.item()

    @property
    def shape(self):
        return self.array.shape

    @property
    def dtype(self):
        return self.array.dtype

    def write(self, values) -> None:
        self.array[...] = values
        if self.writes is not None:
            counts = self._part(self.writes)
            counts += 1

    def _part(self, arrays):
        array = arrays[self.rank]
        for index in self.index:
            array = array[(*index, ...)]
        return array


class Warp:
    """A warpgroup, or a warp of one: its operations, how many of them are done, and its copies out of shared memory."""

    def __init__(self, name):
        self.name, self.operations, self.done = name, [], 0
        self.stores, self.waiters = [], []
        # Whether copies may miss what was written to shared memory, or by other ranks to global memory.
        self.uncommitted = self.unfenced = False


class FrameCodec(frame_transport.FrameCodec):
    """Frames [codes or scales, 64 rows]."""

    def __init__(self, tiling, model):
        super().__init__(tiling)
        self.model = model

    def scratch(self, *slots):
        return Type((*slots, 2, TILE_ROWS))

    global_type = scratch

    def encode(self, frame_s, z, exponent):
        (z,) = z
        self.model.record(lambda: frame_s.write(np.stack(split(z.values))), uncommitted=True)
        return Registers(lambda: np.abs(z.values))

    def codes(self, frame_s, dtype=None):
        return [self.model.load(frame_s.at[0])]

    def scales(self, frame_s, exponent):
        return [self.model.load(frame_s.at[1])]

    def decode(self, frame_s, exponent):
        return _scale_rows(None, self.codes(frame_s), self.scales(frame_s, exponent))


class Rotator:
    """Doubles values, and halves them."""

    operand, scratch, dtype = None, Type((1,)), np.dtype(np.float32)

    def __init__(self, model):
        self.model = model

    def load(self, matrices_g, matrices_s, barrier, warpgroup):
        pass

    def wait(self, barrier):
        pass

    def rotate(self, x_s, matrices_s):
        x = self.model.load(x_s)
        return [Registers(lambda: x.values * ROTATION)]

    def unrotate(self, z, matrices_s, dtype=None):
        return [Registers(lambda z=z: z.values / ROTATION) for z in z]

    unrotate_codes = unrotate


class NVLinkModel:
    """`ranks` GPUs. After `install` `collective.run` takes and returns arrays of all ranks, and runs on them.

    After a run: y_writes {rank: int[rows]} counts how often each row was written; inbox_writes [inbox][rank][source,
    tile] how often each frame; signals [inbox][CTA][rank, source] are the semaphores.
    """

    def __init__(self, ranks: int, buffers, timing: str):
        self.ranks, self.buffers, self.timing = ranks, buffers, timing
        self.random = random.Random(f"{ranks} {timing}")

    def install(self, monkeypatch, *, ctas: int, min_signals: int) -> None:
        """Puts the model in the place of jax and of what computes values. At most so many CTAs run; so many signals
        stand for a CTA's frames at least."""
        monkeypatch.setattr(tile_schedule, "MAX_CTAS", ctas)
        monkeypatch.setattr(tile_schedule, "MIN_SIGNALS", min_signals)
        lax = SimpleNamespace(
            axis_index=lambda axis: np.int32(self.place[axis]), div=_div, rem=_rem, fori_loop=_fori_loop,
            cond=lambda condition, yes, no: yes() if condition else no(), optimization_barrier=lambda values: values,
        )  # fmt: skip
        jnp = SimpleNamespace(
            int32=np.int32, uint8=np.uint8, float16=np.float16, float32=np.float32, zeros=np.zeros, minimum=np.minimum,
            maximum=_maximum, full=lambda shape, value, dtype: _constant(value),
        )  # fmt: skip
        pl = SimpleNamespace(
            when=_when, ds=lambda start, size: slice(start, start + size), semaphore_wait=self.semaphore_wait
        )
        plgpu = SimpleNamespace(
            kernel=self.kernel, warp_map=self.warp_map, remote_ref=self.remote_ref, barrier_wait=self.barrier_wait,
            barrier_arrive=self.barrier_arrive, copy_gmem_to_smem=self.copy_gmem_to_smem,
            copy_smem_to_gmem=self.copy_smem_to_gmem, wait_smem_to_gmem=self.wait_smem_to_gmem,
            commit_smem=lambda: self._mark(uncommitted=False), set_max_registers=lambda count, action: None,
            layout_cast=lambda value, layout: value, Layout=SimpleNamespace(WGMMA=None),
            OOBFillMode=SimpleNamespace(PROMISE_IN_BOUNDS=None), SMEM=lambda shape, *_, **__: Type(shape[:-1]),
            Barrier=lambda num_barriers=1: Type((num_barriers,), counters=True),
            SemaphoreType=SimpleNamespace(REGULAR=lambda shape: Type(shape, counters=True)),
        )  # fmt: skip
        for module in (tiling, tile_schedule, frame_transport, warp_roles, collective):
            for name, fake in {"lax": lax, "jnp": jnp, "pl": pl, "plgpu": plgpu}.items():
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, fake)
        monkeypatch.setattr(frame_transport, "signal", self.signal)
        monkeypatch.setattr(frame_transport, "_fence_proxy_async", lambda: self._mark(unfenced=False))
        monkeypatch.setattr(warp_roles, "WireWriter", SimpleNamespace(no_maxima=lambda tiling: _constant(0)))
        values = SimpleNamespace(scale_rows=_scale_rows, store_tile=self.store_tile)
        monkeypatch.setattr(warp_roles, "tile_codec", values)
        monkeypatch.setattr(collective, "Rotator", lambda tiling, dtype: Rotator(self))
        monkeypatch.setattr(collective, "FrameCodec", lambda tiling: FrameCodec(tiling, self))
        monkeypatch.setattr(collective, "fit_buffers", lambda *_: self.buffers)
        monkeypatch.setattr(collective, "put_largest", self.put_largest)

    # What a kernel's body calls: each records an operation of the warp that is at work.

    def record(self, operation, **marks) -> None:
        """operation() is None once it is done; else what it waits for."""
        self._mark(**marks)
        self.warp.operations.append(operation)

    def _mark(self, **marks) -> None:
        for name, value in marks.items():
            setattr(self.warp, name, value)

    def load(self, ref) -> Registers:
        registers = Registers(ref.array.copy)
        self.record(registers.compute)
        return registers

    def store_tile(self, tiling, buffer, values, transforms) -> None:
        (registers,) = values
        self.record(lambda: buffer.write(registers.values), uncommitted=True)

    def put_largest(self, row_g, registers, interpret) -> None:
        self.record(lambda: row_g.write(registers.values.max()))

    def remote_ref(self, ref, device):
        (rank,) = device.values()
        return Ref(ref.arrays, ref.writes, rank=int(rank), index=ref.index)

    def barrier_wait(self, barrier) -> None:
        counter = barrier.counter

        def operation():
            if counter.count == counter.seen:
                return counter
            counter.seen += 1

        self.record(operation)

    def barrier_arrive(self, barrier) -> None:
        assert not self.warp.uncommitted, "a slot is handed over whose frame a copy may not see"
        self.record(lambda: self._complete(barrier.counter))

    def semaphore_wait(self, semaphore, value, decrement) -> None:
        assert not decrement
        counter = semaphore.counter
        counter.asked = max(counter.asked, value)
        self.record(lambda: None if counter.count >= value else counter, unfenced=True)

    def signal(self, semaphores) -> None:
        def operation():
            for semaphore in semaphores:
                semaphore.counter.count += 1
                self._wake(semaphore.counter)

        self.record(operation)

    def copy_gmem_to_smem(self, from_g, to_s, barrier, oob_mode=None) -> None:
        assert not self.warp.unfenced, "a copy may not see what a semaphore stands for"
        self.loads.add(barrier.counter)

        def copy():
            to_s.write(from_g.array)
            self._complete(barrier.counter)

        self.record(lambda: self._start(copy, late=False))

    def copy_smem_to_gmem(self, from_s, to_g) -> None:
        warp = self.warp
        assert not warp.uncommitted, "a copy may not see what was written to shared memory"

        def operation():
            store = SimpleNamespace(read=False, written=False)
            warp.stores.append(store)
            self._start(lambda: read(store), first=True)

        def read(store):
            store.read, values = True, from_s.array.copy()
            self._start(lambda: write(store, values))
            self._wake(warp)

        def write(store, values):
            store.written = True
            to_g.write(values)
            self._wake(warp)

        self.record(operation)

    def wait_smem_to_gmem(self, n, wait_read_only=False) -> None:
        warp = self.warp

        def operation():
            older = warp.stores[: max(0, len(warp.stores) - n)]
            if not all(store.read if wait_read_only else store.written for store in older):
                return warp
            while warp.stores and warp.stores[0].written:
                del warp.stores[0]

        self.record(operation)

    def warp_map(self, body) -> None:
        warpgroup = self.warp
        for i in range(WARPS):
            self.warp = Warp(f"{warpgroup.name}, warp {i}")
            self.warps.append(self.warp)
            body(np.int32(i))
            self._end()
        self.warp = warpgroup

    def _end(self) -> None:
        stores = self.warp.stores

        def operation():
            assert all(store.read for store in stores), "a warp ends before its copies have left shared memory"

        self.record(operation)

    # The launch.

    def kernel(self, body, *, out_type, scratch_types, grid, grid_names, num_threads, thread_name, compiler_params):
        """Returns a function of x, matrices and exponent, arrays of all ranks, that returns y and the maxima alike."""
        y_type, largest_type, *inbox_types = out_type
        inboxes = len(inbox_types)

        def launch(x, matrices, exponent):
            everywhere = range(self.ranks)
            zeros = lambda *shape: {rank: np.zeros(shape, int) for rank in everywhere}
            allocate = lambda type: {rank: type.make() for rank in everywhere}
            x_g = {rank: x[rank] for rank in everywhere}
            y_g, largest_g = allocate(Type(y_type.shape[:1])), allocate(Type(largest_type.shape))
            inboxes_g = [allocate(type) for type in inbox_types]
            self.y_writes = zeros(*y_type.shape[:1])
            self.inbox_writes = [zeros(*type.shape[:2]) for type in inbox_types]
            self.signals = [[] for _ in inbox_types]
            self.warps, self.pending, self.loads = [], collections.deque(), set()
            for cta in range(*grid):
                scratch = [allocate(type) for type in scratch_types]
                for signals, arrays in zip(self.signals, scratch[len(scratch) - inboxes :]):
                    signals.append(np.stack([arrays[rank] for rank in everywhere]))
                for rank, warpgroup in itertools.product(everywhere, range(num_threads)):
                    self.place = {"tp": rank, grid_names[0]: cta, thread_name: warpgroup}
                    self.warp = Warp(f"rank {rank}, CTA {cta}, warpgroup {warpgroup}")
                    self.warps.append(self.warp)
                    own = functools.partial(Ref, rank=rank)
                    operands = own(x_g), None, None, own(y_g, self.y_writes), own(largest_g)
                    body(*operands, *map(own, inboxes_g, self.inbox_writes), *map(own, scratch))
                    self._end()
            self._run()
            assert all(counter.count == counter.seen for counter in self.loads), "a copy to shared memory is left over"
            return [np.stack([arrays[rank] for rank in everywhere]) for arrays in (y_g, largest_g)]

        return launch

    # The simulation.

    def _run(self) -> None:
        """Carries out what was recorded. Raises AssertionError where warps wait for each other."""
        self.ready, at_random = collections.deque(self.warps), self.timing == "random"
        while self.ready or self.pending:
            if self.pending and (not self.ready or (at_random and self.random.random() < 0.5)):
                self._take(self.pending)()
            else:
                self._go_on(self._take(self.ready), self.random.randrange(1, 5) if at_random else None)
        waiting = [f"{w.name}: at {w.done} of {len(w.operations)}" for w in self.warps if w.done < len(w.operations)]
        assert not waiting, "deadlock: " + "; ".join(waiting[:8])

    def _take(self, queue):
        if self.timing == "random":
            queue.rotate(self.random.randrange(len(queue)))
        return queue.popleft()

    def _go_on(self, warp, steps: int | None) -> None:
        for operation in itertools.islice(warp.operations, warp.done, None if steps is None else warp.done + steps):
            blocked = operation()
            if blocked is not None:
                blocked.waiters.append(warp)
                return
            warp.done += 1
        if warp.done < len(warp.operations):
            self.ready.append(warp)

    def _start(self, copy, *, late: bool = True, first: bool = False) -> None:
        """late: what is sent arrives late; what is fetched does so only at random. first: before what is pending."""
        if self.timing == "early" or (self.timing == "late" and not late):
            copy()
        elif first:
            self.pending.appendleft(copy)
        else:
            self.pending.append(copy)

    def _complete(self, counter) -> None:
        counter.count += 1
        assert counter.count - counter.seen == 1, "a barrier completes twice, and its warp has waited once"
        self._wake(counter)

    def _wake(self, waited_for) -> None:
        self.ready.extend(waited_for.waiters)
        waited_for.waiters.clear()


def _div(a, b):
    return np.int32(int(a) // int(b)) if a >= 0 else -np.int32(-int(a) // int(b))


def _rem(a, b):
    return np.int32(a - _div(a, b) * b)


def _fori_loop(first, end, body, carry):
    for i in range(first, end):
        carry = body(np.int32(i), carry)
    return carry


def _when(condition):
    return lambda body: body() if condition else None


def _constant(value) -> Registers:
    return Registers(lambda: np.full(TILE_ROWS, value, np.float32))


def _maximum(a, b):
    return Registers(lambda: np.maximum(a.values, b.values))


def _scale_rows(tiling, codes, scales):
    return [a * b for a, b in zip(codes, scales)]
