"""The tiles of a product: 256 rows and 128 columns, four frames of 64 rows."""

TILE_M, TILE_N, TILE_K = 256, 128, 64
FRAMES = 4
WORKERS = 2  # warpgroups that multiply
PER = FRAMES // WORKERS  # frames of a tile that each of them has
