from __future__ import annotations

import math

import pytest

from promoe import units


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (862.5 * 2**20, "862.5 MiB"), (2.5 * 2**30, "2.50 GiB")],
)
def test_memory_is_written_in_binary_units(nbytes: float, text: str) -> None:
    assert units.format_memory(nbytes) == text


def test_traffic_is_written_in_decimal_megabytes() -> None:
    assert units.format_megabytes(212e6) == "212"
    assert units.format_megabytes(9.374e6) == "9.37"
    assert units.format_megabytes(None) == units.DASH
    assert units.format_bandwidth(3.514e9) == "3.51 GB/s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 ms"), (2.1e-4, "210 µs"), (0.0741, "74.1 ms"), (0.9994, "999 ms"), (0.9996, "1.00 s"), (2.31, "2.31 s")],
)
def test_durations_carry_the_unit_that_fits(seconds: float, text: str) -> None:
    assert units.format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(1234.4, "1234"), (74.123, "74.1"), (0.0321, "0.0321"), (-5.0, "-5.00"), (0, "0")]
)
def test_numbers_have_three_significant_digits(value: float, text: str) -> None:
    assert units.format_number(value) == text


@pytest.mark.parametrize(("share", "text"), [(0.0, "0%"), (1.0, "100%"), (0.6123, "61.2%"), (0.9996, "100.0%")])
def test_shares_are_per_cent_and_only_exact_ends_lack_a_decimal(share: float, text: str) -> None:
    assert units.format_share(share) == text


@pytest.mark.parametrize(
    "write",
    [
        units.format_megabytes,
        units.format_ms,
        units.format_number,
        units.format_seconds,
        units.format_share,
        units.format_times,
    ],
)
def test_what_has_no_value_is_a_dash(write) -> None:  # type: ignore[no-untyped-def]
    assert write(math.nan) == write(None) == units.DASH


def test_ratio_over_nothing_is_nan() -> None:
    assert units.ratio(3, 2) == 1.5
    assert math.isnan(units.ratio(3, 0))
    assert not units.is_number(units.ratio(0, 0))
    assert not units.is_number(None)
    assert units.is_number(0.0)


def test_an_infinite_number_is_written_not_raised() -> None:
    assert units.format_number(math.inf) == "∞"


def test_a_table_has_its_first_column_to_the_left_and_the_others_to_the_right() -> None:
    rows = [["", "hits", ""], ["a name", "1", "22"]]
    assert units.aligned(rows) == ["        hits", "a name     1  22"]
    assert units.aligned(rows, narrowest=5) == ["         hits", "a name      1     22"]
