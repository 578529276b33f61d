from __future__ import annotations

import pytest

from commands.plan.planned import times
from promoe.commands.plan.times import Curve


def test_of_two_measurements_the_shorter_times() -> None:
    one, other = Curve(((1, 2.0), (10, 5.0))), Curve(((1, 1.0), (11, 6.0)))
    assert one.quicker(other).points == ((1, 1.0), (10, 5.0))
    found = times(0.002, 0.003, 0.1).quicker(times(0.001, 0.004, 0.2))
    assert (found.layer(1), found.expert(1), found.group_s) == (0.001, 0.003, 0.1)


def test_between_points_on_a_line_and_beyond_the_last_too() -> None:
    curve = Curve(((1, 2.0), (11, 4.0)))
    assert curve(1) == 2.0
    assert curve(0.5) == 2.0, "fewer rows read the same weights"
    assert curve(6) == 3.0
    assert curve(21) == pytest.approx(6.0)
    assert Curve(((1, 2.0),))(50) == 2.0
    assert Curve(((1, 2.0), (11, 1.0)))(21) == 1.0, "noise does not make more rows cheaper still"
