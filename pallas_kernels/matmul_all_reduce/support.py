"""The tiles of a matmul with its all-reduce, and what the kernel supports. Importable without Mosaic or a GPU."""

from __future__ import annotations

from pallas_kernels.formats import Format

# Rows, columns and inner dimension of a tile, in elements. A tile's rows are frames of 64 rows.
TILE_M, TILE_N, TILE_K = 256, 128, 64
FRAMES_PER_TILE = 4
RANKS = (2, FRAMES_PER_TILE)


def why_unsupported(fmt: Format, m: int, k: int, n: int, *, dtype: str, ranks: int) -> str | None:
    """Returns why [m, k] @ [k, n] over so many GPUs cannot run, None where it can."""
    from pallas_kernels import compat  # imports Mosaic

    if not compat.WARPS_KNOW_THE_MESH:
        return "kernels over NVLink need jax 0.11 or newer"
    if ranks not in RANKS:
        return f"a product with its all-reduce is for {' or '.join(map(str, RANKS))} ranks, not {ranks}"
    if dtype != "bfloat16":
        return f"a product with its all-reduce takes bfloat16, not {dtype}"
    if fmt.block != TILE_N or fmt.rotation != "hadamard" or fmt.scale == "site" or fmt.rounding != "nearest":
        return (
            f"a product with its all-reduce rotates blocks of {TILE_N}, with scales, and rounds to nearest: not {fmt}"
        )
    for name, size, tile in (("rows", m, TILE_M), ("inner dimension", k, TILE_K), ("columns", n, TILE_N)):
        if size % tile or not size:
            return f"a product with its all-reduce has {name} in multiples of {tile}, not {size}"
    return None


__all__ = ["FRAMES_PER_TILE", "RANKS", "TILE_K", "TILE_M", "TILE_N", "why_unsupported"]
