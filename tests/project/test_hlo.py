"""What tests read in compiled programs: the groups of devices, however XLA writes them."""

import pytest
from hlo import groups

LINE = "  %all-gather.1 = u8[8,1024]{1,0} all-gather(%x), channel_id=1, replica_groups=GROUPS, dimensions={0}"


@pytest.mark.parametrize(
    "written,expected",
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{{0,2},{1,3}}", ((0, 2), (1, 3))),
        ("[2,2]<=[4]", ((0, 1), (2, 3))),
        ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("mesh['dp'=1,'tp'=4] {'tp'}", ((0, 1, 2, 3),)),
        ("mesh['dp'=2,'pp'=1,'tp'=2] {'tp'}", ((0, 1), (2, 3))),
        ("mesh['dp'=2,'pp'=1,'tp'=2] {'dp'}", ((0, 2), (1, 3))),
        ("mesh['dp'=2,'tp'=2] {'dp','tp'}", ((0, 1, 2, 3),)),
    ],
)
def test_groups(written, expected):
    assert groups(LINE.replace("GROUPS", written)) == [("all-gather", "uint8", 8192, expected)]
