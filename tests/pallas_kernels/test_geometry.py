"""How an array is cut into messages, and which cuts are refused."""

import numpy as np
import pytest

from pallas_kernels import Geometry


def test_messages_lie_side_by_side_or_are_a_chunk_of_those():
    whole = Geometry(10, 2, 5)
    assert whole.is_whole and whole.distance == 5
    assert Geometry(10, 2, 5, 0, 5).is_whole
    chunk = Geometry(10, 2, 2, 3, 5)  # 3, 4 and 8, 9
    assert not chunk.is_whole and chunk.distance == 5
    assert not Geometry(10, 2, 3, 0, 5).is_whole
    assert Geometry(1, 4, 128).distance == 128  # three messages of zeros


@pytest.mark.parametrize(
    "fields,message",
    [
        ((0, 1, 1), "must have at least one element"),
        ((10, 2, 4), "hold fewer elements than the array has"),
        ((10, 2, 2, 4, 5), "must stay within the stride"),
        ((10, 2, 2, -1, 5), "must stay within the stride"),
        ((10, 2, 6, 0, 5), "must stay within the stride"),
        ((11, 2, 2, 0, 5), "hold fewer elements than the array has"),
    ],
)
def test_bad_geometries(fields, message):
    with pytest.raises(ValueError, match=message):
        Geometry(*fields)


@pytest.mark.parametrize(
    "fields,message",
    [
        ((10.0, 2, 5), "Geometry.elements=10.0: must be an integer, is of type float"),
        ((10, 2, None), "Geometry.per_message=None: must be an integer"),
        ((10, 2, 5, 0, 5.0), "Geometry.stride=5.0: must be an integer"),
    ],
)
def test_geometries_are_of_integers(fields, message):
    with pytest.raises(TypeError, match=message):
        Geometry(*fields)
    assert Geometry(*np.int64([10, 2, 5])) == Geometry(10, 2, 5)
