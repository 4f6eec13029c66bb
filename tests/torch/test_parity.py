"""The levels of one library beside each other, and beside double precision; parity.py takes the stock module's file too."""

from __future__ import annotations

import pytest
from tests.torch.building import Libraries
from tests.torch.opening import open_portable
from tests.torch.parity import Mode, compare

SIZES = (1, 7, 63, 64, 65, 1000)
MODE = Mode(adamw=True, decay=0.01, correction=True)


def test_levels_differ_by_rounding_and_are_as_near_to_the_truth(libraries: Libraries) -> None:
    modules = [open_portable(libraries["cpu_adam", level]) for level in ("x86_64", "x86_64_v3")]
    for name, found in compare(modules[0], modules[1], SIZES, [MODE]).items():
        assert found.words == sum(SIZES) * 3 * 3, name
        assert found.differing < found.words / 2, name  # FMA
        assert found.differing, name
        assert found.second_error_ulps == pytest.approx(found.first_error_ulps, rel=0.1), name


def test_a_library_is_equal_to_itself(libraries: Libraries) -> None:
    module = open_portable(libraries["cpu_adam", "x86_64_v3"])
    same = compare(module, module, [100], [MODE])
    assert {(found.differing, found.largest_ulps) for found in same.values()} == {(0, 0)}
