"""Work of a thread on its own registers: layouts, packing and unpacking of codes, as MLIR inside of the kernels.

| file | holds |
|---|---|
| `layout.py` | the order of a rotated block's columns in registers; a thread's accesses to its row |
| `pack_int.py` | integer codes, four to a 32-bit word, to floats and back |
| `pack_float.py` | codes of 8-bit and sub-byte floats by hardware casts; e2m1 |
| `thread_blocks.py` | one thread per block: blocks of 32 that are not rotated |
"""
