"""Where tiles begin. A tensor copy that begins inside a group of 8 rows reads wrongly, and only a real GPU shows it."""

import jax.numpy as jnp
import pytest

from pallas_kernels import Format, Geometry
from pallas_kernels.mosaic import pipeline, ragged
from pallas_kernels.mosaic.kernels import encode
from pallas_kernels.mosaic.tiling import GROUP_ROWS, Tiling

FORMATS = [Format("e4m3", b, "hadamard", "bfloat16") for b in (32, 128, 256)]


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: str(f.block))
@pytest.mark.parametrize("messages", [1, 2, 4])
@pytest.mark.parametrize("n", [8192, 2**15, 2**15 + 1024, 524_416, 524_417, 2**15 + 128, 33 * 8192])
def test_every_tile_begins_at_a_group_of_rows_where_tiles_are_taken(fmt, messages, n):
    geometry = Geometry(messages * n, messages, n)
    if not ragged.tiles_fit(fmt, geometry):
        assert n < 64 * max(128, fmt.block) or (messages > 1 and n % (GROUP_ROWS * max(128, fmt.block)))
        geometry = ragged.padded(fmt, geometry)
    assert ragged.tiles_fit(fmt, geometry)
    tiling = Tiling(fmt, geometry)
    tiling.check_alignment()
    seen = set()
    for tile in range(tiling.tiles):
        message, row = (int(v) for v in tiling.locate(jnp.int32(tile)))
        assert row % GROUP_ROWS == 0 and int(tiling.x_row(message, row)) % GROUP_ROWS == 0
        assert 0 <= row <= tiling.rows - 64
        seen |= {(message, r) for r in range(row, row + 64)}
    assert len(seen) == messages * tiling.rows
    covered = ragged.whole_elements(fmt, geometry.per_message)
    assert tiling.rows * tiling.row_elements == covered


def test_messages_that_begin_inside_a_group_are_refused():
    # What a 2-rank sum of 2^20 + 8 elements had: 4,097 rows a message.
    tiling = Tiling(FORMATS[1], Geometry(2 * 524_416, 2, 524_416))
    with pytest.raises(ValueError, match="multiples of 1024"):
        encode(tiling, jnp.zeros((8192, 128), jnp.bfloat16), None, None)


@pytest.mark.parametrize("most", [1, 2, 7, 132])
def test_fewest_ctas_of_which_none_has_more_tiles(most, monkeypatch):
    monkeypatch.setattr(pipeline, "MAX_CTAS", most)
    largest_share = lambda tiles, ctas: -(-tiles // ctas)
    for tiles in (1, 2, 6, 7, 8, 131, 132, 133, 300, 1792, 3584, 100_000):
        for warpgroups in (1, 2, 3):
            workers = pipeline.Workers(tiles, warpgroups, may_be_dynamic=False)
            assert workers.ctas <= most
            assert largest_share(tiles, workers.ctas) == largest_share(tiles, most)
            assert workers.ctas == 1 or largest_share(tiles, workers.ctas - 1) > largest_share(tiles, most)
            # Nor has a worker more.
            assert largest_share(tiles, workers.count) <= largest_share(tiles, min(tiles, most) * warpgroups)
