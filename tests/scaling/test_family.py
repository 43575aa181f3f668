"""Families: parameter counts of the Iso-Depth paper, and refusals."""

import pytest

from looplab.scaling.family import FullyLooped, IsoDepth, IsoStored, read_family


def test_parameters_are_those_of_the_iso_depth_paper():
    """Printed: 98.3, 59.8, 40.2, 30.3 M at width 640 for r = 1, 2, 4, 8 (arXiv:2604.21106)."""
    found = [IsoDepth().shape(640, r).stored for r in (1, 2, 4, 8)]
    assert found == [98_304_000, 59_801_600, 40_140_800, 30_310_400]


def test_families_hold_what_they_say():
    assert IsoStored(prelude=1, core=3, coda=2).layers(8) == (3, 3)
    assert FullyLooped(core=6).shape(64, 4).n_once == 0
    for family in (IsoDepth(executed=12, prelude=1, coda=1), IsoStored(), FullyLooped(core=3)):
        assert read_family(family.name) == family


def test_bad_families_are_refused_with_a_way_out():
    with pytest.raises(
        ValueError, match="must divide the 16 layers inside the loop. Got 3. Take one of 1, 2, 4, 8, 16"
    ):
        IsoDepth().shape(64, 3)
    with pytest.raises(ValueError, match="family must be one of iso-depth, iso-stored, fully-looped. Got 'isodepth:1'"):
        read_family("isodepth:1")
    with pytest.raises(ValueError, match="must be written iso-depth:EXECUTED,PRELUDE,CODA"):
        read_family("iso-depth:20,2")
