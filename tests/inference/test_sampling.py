"""Temperature, top-k and top-p against their definitions, on drawn frequencies."""

import jax
import numpy as np
import pytest

from taco_jax.config import ConfigError
from taco_jax.inference.sampling import Sampling, greedy, sample

draw = jax.jit(sample)

LOGITS = np.log(np.array([0.05, 0.4, 0.1, 0.3, 0.15], np.float32))
DRAWS = 4000


@pytest.fixture(scope="module")
def frequencies():
    """Sampling's fields -> share of each id among draws at many positions."""

    def of(**fields):
        logits = np.tile(LOGITS, (DRAWS, 1))
        rows = Sampling(**fields).rows(DRAWS)._replace(seed=np.full(DRAWS, fields.get("seed", 0), np.uint32))
        return np.bincount(draw(logits, np.arange(DRAWS, dtype=np.int32), rows), minlength=5) / DRAWS

    return of


@pytest.mark.parametrize(
    "fields, want",
    [
        ({"temperature": 1.0}, [0.05, 0.4, 0.1, 0.3, 0.15]),
        ({"temperature": 1.0, "seed": 9}, [0.05, 0.4, 0.1, 0.3, 0.15]),
        ({"temperature": 0.5}, np.array([0.05, 0.4, 0.1, 0.3, 0.15]) ** 2 / 0.285),
        ({"temperature": 1.0, "top_k": 2}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"temperature": 1.0, "top_p": 0.69}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"temperature": 1.0, "top_p": 0.71}, [0, 0.4 / 0.85, 0, 0.3 / 0.85, 0.15 / 0.85]),
        ({"temperature": 1.0, "top_p": 1e-6}, [0, 1, 0, 0, 0]),
        # top_p counts what top_k left: 0.4 / 0.7 is more than 0.55 already.
        ({"temperature": 1.0, "top_k": 2, "top_p": 0.55}, [0, 1, 0, 0, 0]),
        ({"temperature": 0.0, "top_k": 3}, [0, 1, 0, 0, 0]),
    ],
)
def test_frequencies(frequencies, fields, want):
    np.testing.assert_allclose(frequencies(**fields), want, atol=4 * 0.5 / np.sqrt(DRAWS))


def test_greedy_takes_the_first_of_equals():
    assert greedy(np.array([[0.0, 2.0, 2.0]], np.float32)).tolist() == [1]


def test_a_row_draws_with_its_own_seed_and_position():
    logits = np.zeros((4, 50_000), np.float32)
    rows = Sampling(temperature=1.0, seed=3).rows(4)
    assert rows.seed.tolist() == [3, 4, 5, 6]
    drawn = draw(logits, np.array([7, 7, 7, 7], np.int32), rows).tolist()
    assert len(set(drawn)) == 4
    shifted = draw(logits[:1], np.array([7], np.int32), Sampling(temperature=1.0, seed=5).rows(1)).tolist()
    assert shifted == drawn[2:3]
    assert draw(logits[:1], np.array([8], np.int32), Sampling(temperature=1.0, seed=5).rows(1)).tolist() != shifted


@pytest.mark.parametrize("fields", [{"temperature": float("nan")}, {"top_k": -1}, {"top_p": 1.5}, {"seed": -1}])
def test_out_of_range(fields):
    with pytest.raises(ConfigError, match=next(iter(fields))):
        Sampling(**fields)
