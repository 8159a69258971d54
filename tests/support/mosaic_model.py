"""Functions of `plgpu.inline_mgpu` without a GPU: their MLIR is built as for one and evaluated in numpy.

All 128 threads of a warpgroup are evaluated at once: an SSA value is an array whose first dimension is the thread. A
memory is bytes, and a pointer an index of them.
"""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax._src.interpreters import mlir
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, func

THREADS = 128
_TYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "i8": np.uint8, "i16": np.uint16}
_TYPES |= {"i32": np.uint32, "i64": np.uint64, "index": np.uint64, "i1": np.bool_}
_CASTS = {"e4m3": (ml_dtypes.float8_e4m3fn, 448.0), "e5m2": (ml_dtypes.float8_e5m2, 57344.0)}


class Memory:
    """A ref of an inlined function: a buffer of bytes. `tiles`: the shape that its transforms give it."""

    def __init__(self, array, tiles=None):
        self.shape, self.dtype, self.tiles = array.shape, array.dtype, tiles or array.shape
        self.bytes = np.ascontiguousarray(array).view(np.uint8).reshape(-1).copy()

    @property
    def array(self):
        return self.bytes.view(self.dtype).reshape(self.shape)


def install(monkeypatch) -> None:
    """Inlined functions take numpy arrays and `Memory`, and return numpy arrays, of positions as in registers."""
    monkeypatch.setattr(plgpu, "inline_mgpu", _inline)
    monkeypatch.setattr(mgpu.utils, "memref_ptr", lambda memory: memory)
    monkeypatch.setattr(mgpu.utils, "getelementptr", _Pointer.make)
    monkeypatch.setattr(mgpu.utils, "thread_idx", lambda: _Function.current.thread)


def _inline(arg_types, return_type=None):
    return lambda function: lambda *args: _Function(function, return_type).run(args)


class _Pointer:
    """getelementptr of a memref: the offset in bytes as an operation of its own, whose value `_Function` keeps."""

    @staticmethod
    def make(base, indices, element):
        (index,) = indices
        i32 = ir.IntegerType.get_signless(32)
        index = arith.constant(i32, index) if isinstance(index, int) else index
        memory, offset = _Function.current.pointers.get(base, (base, None))
        offset = index if offset is None else arith.addi(offset, index)
        pointer = ir.Operation.create(
            "test.pointer", operands=[offset], results=[ir.Type.parse("!llvm.ptr")], loc=ir.Location.unknown()
        ).result
        _Function.current.pointers[pointer] = memory, offset
        return pointer


class _Function:
    current = None

    def __init__(self, function, return_type):
        self.function, self.return_type = function, return_type

    def run(self, args):
        context = mlir.make_ir_context()
        context.allow_unregistered_dialects = True  # of pointers
        mgpu.dialect.register_dialect(context)
        with context, ir.Location.unknown():
            return self._run(args)

    def _run(self, args):
        _Function.current, self.pointers, self.values = self, {}, {}
        module = ir.Module.create()
        types = [ir.IntegerType.get_signless(32)]
        for arg in args:
            if isinstance(arg, Memory):
                types.append(ir.MemRefType.get(arg.tiles, _mlir(arg.dtype)))
            elif arg.ndim == 1:
                types += [ir.VectorType.get((1,), _mlir(arg.dtype))] * 2
            else:
                types += [ir.VectorType.get((2,), _mlir(arg.dtype))] * (arg.shape[1] // 4)
        with ir.InsertionPoint(module.body):
            body = func.FuncOp("f", ir.FunctionType.get(types, [])).add_entry_block()
        with ir.InsertionPoint(body):
            inputs, given = list(body.arguments), []
            self.thread = inputs.pop(0)
            self.values[self.thread] = np.arange(THREADS, dtype=np.uint32)
            for arg in args:
                if isinstance(arg, Memory):
                    given.append(inputs.pop(0))
                    self.values[given[-1]] = arg
                    continue
                registers = _registers(arg)
                mine = np.array([inputs.pop(0) for _ in registers], object)
                self.values |= dict(zip(mine, registers))
                layout = mgpu.WGMMA_LAYOUT if arg.ndim == 2 else mgpu.WGMMA_ROW_LAYOUT
                mine = mine.reshape(layout.registers_shape(arg.shape))
                signed = True if arg.dtype.kind == "i" else None
                given.append(mgpu.FragmentedArray(_registers=mine, _layout=layout, _is_signed=signed))
            result = self.function(None, *given)
            func.ReturnOp([])
        with np.errstate(all="ignore"):
            for op in body.operations:
                if op.operation.name != "func.return":
                    self._evaluate(op.operation)
        several = isinstance(result, (list, tuple))
        out = [self._array(r) for r in (result if several else [result] if result is not None else [])]
        return out if several else out[0] if out else None

    def _array(self, fragmented):
        return _positions([self.values[r] for r in fragmented.registers.reshape(-1)], fragmented.shape)

    def _evaluate(self, op):
        name, results = op.name, list(op.results)
        if name == "llvm.store":
            return self._access(op.operands[1], op.operands[0].type, self.values[op.operands[0]])
        if name == "llvm.load":
            self.values[results[0]] = self._access(op.operands[0], results[0].type)
            return None
        operands = [self.values[v] for v in op.operands]
        self.values[results[0]] = _operation(name, op, operands, results[0].type)
        return None

    def _access(self, pointer, type_, value=None):
        memory, offset = self.pointers[pointer]
        shape, dtype = _shape(type_)
        size = int(np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize
        where = self.values[offset].astype(np.int64)[:, None] + np.arange(size)
        assert (where[:, 0] % size == 0).all(), "misaligned"
        buffer = self.values[memory].bytes
        if value is None:
            return buffer[where].view(dtype).reshape(THREADS, *shape)
        buffer[where] = np.ascontiguousarray(value.reshape(THREADS, -1)).view(np.uint8)
        return None


def _operation(name, op, operands, type_):
    shape, dtype = _shape(type_)
    a, b, *_ = [*operands, None, None]
    signed = lambda x: x.view(np.int32)
    binary = {
        "addi": lambda: a + b, "subi": lambda: a - b, "muli": lambda: a * b, "andi": lambda: a & b,
        "ori": lambda: a | b, "xori": lambda: a ^ b, "shli": lambda: a << b, "shrui": lambda: a >> b,
        "divui": lambda: a // b, "remui": lambda: a % b, "addf": lambda: a + b, "subf": lambda: a - b,
        "mulf": lambda: a * b, "maximumf": lambda: np.maximum(a, b),
        "maxsi": lambda: np.maximum(signed(a), signed(b)).view(np.uint32),
    }  # fmt: skip
    dialect, _, short = name.partition(".")
    if dialect == "arith" and short in binary:
        return binary[short]()
    if name == "arith.constant":
        value = op.attributes["value"]
        value = value.get_splat_value().value if isinstance(value, ir.DenseElementsAttr) else value.value
        value = int(value) & (2 ** (8 * np.dtype(dtype).itemsize) - 1) if dtype not in _FLOATS else value
        return np.full((THREADS, *shape), value, dtype)
    if short in ("extui", "trunci", "extf", "truncf"):
        return a.astype(dtype)
    if name == "math.absf":
        return np.abs(a)
    if name == "arith.bitcast" or name == "vector.bitcast":
        return np.ascontiguousarray(a).view(dtype).reshape(THREADS, *shape)
    if name == "vector.broadcast":
        return np.broadcast_to(a.reshape(THREADS, 1), (THREADS, *shape)).copy()
    if name == "vector.extract":
        return a[:, op.attributes["static_position"][0]]
    if name == "vector.from_elements":
        return np.stack(operands, axis=1)
    if name == "vector.extract_strided_slice":
        start = op.attributes["offsets"][0].value
        return a[:, start : start + shape[0]]
    if name == "vector.insert_strided_slice":
        start, out = op.attributes["offsets"][0].value, b.copy()
        out[:, start : start + a.shape[1]] = a
        return out
    if name == "vector.shuffle":
        return np.concatenate([a, b], axis=1)[:, list(op.attributes["mask"])]
    if name == "test.pointer":
        return a
    if name in ("llvm.mlir.undef", "llvm.mlir.poison", "ub.poison"):
        return np.zeros((THREADS, *shape), dtype)
    if name == "llvm.inline_asm":
        return _assembly(ir.StringAttr(op.attributes["asm_string"]).value, operands)
    raise NotImplementedError(str(op))


def _assembly(text, operands):
    name = text.split()[0]
    a, b, *_ = [*operands, None]
    if name == "prmt.b32":
        a, b, selector = operands
        table = np.stack([(w >> np.uint32(8 * i)) & 0xFF for w in (a, b) for i in range(4)], axis=1)
        out = np.zeros(THREADS, np.uint32)
        for i in range(4):
            digit = (selector >> np.uint32(4 * i)) & 0xF
            byte = np.take_along_axis(table, (digit & 7).astype(np.int64)[:, None], 1)[:, 0]
            byte = np.where(digit & 8, np.where(byte & 0x80, 0xFF, 0), byte)
            out |= byte.astype(np.uint32) << np.uint32(8 * i)
        return out
    if name == "lop3.b32":
        assert text.endswith("0x6A;"), text
        return (a & b) ^ operands[2]
    if name == "fma.rn.f16x2":
        a, b, c = [np.ascontiguousarray(x).view(np.float16).astype(np.float64) for x in operands]
        return (a * b + c).astype(np.float16).view(np.uint32)
    if name == "shf.l.wrap.b32":
        return (b << np.uint32(1)) | (a >> np.uint32(31))
    kind = name.split(".")[-1 if name.endswith("x2") else -2].removesuffix("x2")
    dtype, most = _CASTS[kind]
    if name.startswith("cvt.rn.satfinite"):
        high, low = [np.where(np.isnan(x), x, np.clip(x, -most, most)).astype(dtype).view(np.uint8) for x in operands]
        return low.astype(np.uint16) | (high.astype(np.uint16) << np.uint16(8))
    assert name.startswith("cvt.rn.f16x2"), text
    return np.ascontiguousarray(a).view(dtype).astype(np.float16).view(np.uint32).reshape(THREADS)


_FLOATS = (np.float32, np.float16, ml_dtypes.bfloat16)


def _shape(type_):
    if isinstance(type_, ir.VectorType):
        return tuple(type_.shape), _TYPES[str(type_.element_type)]
    return (), _TYPES.get(str(type_), np.uint32)


def _mlir(dtype) -> ir.Type:
    name = jnp.dtype(dtype).name
    return ir.Type.parse({"float32": "f32", "float16": "f16", "bfloat16": "bf16"}.get(name, f"i{name.strip('uint')}"))


def _places(columns):
    """(rows, columns) of a thread's registers [threads, registers, 2] of an array [64, columns]."""
    thread = np.arange(THREADS)[:, None, None]
    register, e = np.arange(columns // 4)[None, :, None], np.arange(2)[None, None, :]
    return 16 * (thread // 32) + thread % 32 // 4 + 8 * (register % 2), 8 * (register // 2) + 2 * (thread % 4) + e


def _registers(array):
    """[64, w] or [64] in the layout of a product, or of its rows -> what each register holds, [threads, 2 or 1]."""
    array = np.ascontiguousarray(array)
    array = array.view(np.uint32) if array.dtype == np.int32 else array
    if array.ndim == 1:
        rows = _places(4)[0]
        return [array[rows[:, 0, :1] + 8 * half] for half in range(2)]
    rows, columns = _places(array.shape[1])
    return list(array[rows, columns].transpose(1, 0, 2))


def _positions(registers, shape):
    rows, columns = _places(shape[1])
    out = np.zeros(shape, registers[0].dtype)
    out[rows, columns] = np.stack(registers, axis=1)
    return out
