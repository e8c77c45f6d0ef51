"""Sizes and speeds as text: what is read, what is refused, and that printing and reading agree."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from localmoe.core.errors import ConfigError
from localmoe.core.units import format_bytes, format_count, format_seconds, parse_bytes, parse_speed

FACTORS = {
    "": 1, "B": 1, "k": 1000, "KB": 1000, "kib": 1024, "MB": 10**6, "MiB": 1 << 20, "g": 10**9, "GB": 10**9,
    "GiB": 1 << 30, "TB": 10**12, "tib": 1 << 40,
}  # fmt: skip


@given(st.integers(1, 1000), st.sampled_from(sorted(FACTORS)), st.sampled_from(["", " ", "  "]))
def test_a_whole_number_of_any_unit_is_read_exactly(number: int, unit: str, gap: str) -> None:
    assert parse_bytes(f" {number}{gap}{unit} ") == number * FACTORS[unit]


@given(st.integers(1, 2**50))
@example(1023)
@example(1024)
@example(2**20 - 1)
@example(2**40 - 1)
def test_reading_a_printed_size_gives_it_back_within_its_rounding(size: int) -> None:
    text = format_bytes(size)
    assert parse_bytes(text) == pytest.approx(size, rel=0.051)
    assert parse_bytes(f"{size}") == size


def test_fractions_are_read() -> None:
    assert parse_bytes("1.5GiB") == 3 << 29
    assert parse_bytes("0.5 kB") == 500
    assert parse_speed("1.5GB/s") == 1.5e9


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "GiB", "12 G B", "12XB", "-1GB", "+1GB", "1e9", "nan", "1,5GB", ".5GB", "5.GB", "0x10",
        "12GiB\n12GiB", "1 2", "12GB/s", "\N{ARABIC-INDIC DIGIT ONE}GB", "1\N{KELVIN SIGN}iB",
    ],
)  # fmt: skip
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["0", "0GiB", "0.5", "1024PiB"[:4] + "0000000TB", "9" * 400, "1048576TiB"])
def test_sizes_below_a_byte_or_beyond_reason_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="between 1 byte and 1 EiB"):
        parse_bytes(text)


@given(st.text(max_size=20))
def test_any_text_is_either_read_or_refused_in_one_sentence(text: str) -> None:
    for parse in (parse_bytes, parse_speed):
        try:
            assert parse(text) >= 1
        except ConfigError as error:
            assert str(error).endswith(".")


@given(
    st.integers(1, 999),
    st.sampled_from(["B", "KB", "MB", "gb", "GB", "GiB"]),
    st.sampled_from(["/s", "/S", "", " /s"]),
)
def test_a_speed_is_a_size_a_second(number: int, unit: str, ending: str) -> None:
    assert parse_speed(f"{number}{unit}{ending}") == number * {**FACTORS, "gb": 10**9}[unit]


@pytest.mark.parametrize("text", ["", "/s", "fast", "2GB/h", "2GB/s/s", "0/s", "-2GB/s", "infGB/s"])
def test_what_is_no_speed_is_refused_as_a_speed(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a speed"):
        parse_speed(text)


@pytest.mark.parametrize("text", ["12", " 25 ", "60/s", "0.5"])
def test_a_speed_without_a_unit_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="names no unit: write for example 25GB/s"):
        parse_speed(text)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("60Gb/s", "7.5GB/s"), ("60 Gbit/s", "7.5GB/s"), ("100gbit", "12.5GB/s"), ("1Gbps", "0.125GB/s"),
        ("800Mb", "100MB/s"), ("8Gib/s", "1GiB/s"), ("16b/s", "2B/s"),
    ],
)  # fmt: skip
def test_a_speed_in_bits_is_refused_with_the_same_in_bytes(text: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"in bits: write it in bytes, as {meant}\\.") as refused:
        parse_speed(text)
    assert repr(text) in str(refused.value) and parse_speed(meant) > 0


def test_numbers_are_printed_for_people() -> None:
    assert [format_bytes(n) for n in (0, 1, 1023, 1024, 1536, 12 << 30, 3 << 40, 5000 << 40)] == [
        "0 B", "1 B", "1023 B", "1.0 KiB", "1.5 KiB", "12.0 GiB", "3.0 TiB", "5000.0 TiB",
    ]  # fmt: skip
    assert [format_count(n) for n in (0, 999, 1000, 14_300_000_000, 2 * 10**12)] == [
        "0", "999", "1.0 K", "14.3 B", "2.0 T",
    ]  # fmt: skip


def test_durations_are_printed_for_people() -> None:
    seconds = (0, 0.4, 45, 89.4, 90, 149, 151, 3569, 3571, 4800, 36_000, 90_000)
    assert [format_seconds(value) for value in seconds] == [
        "0 s", "0 s", "45 s", "89 s", "2 min", "2 min", "3 min", "59 min", "1 h 0 min", "1 h 20 min",
        "10 h 0 min", "25 h 0 min",
    ]  # fmt: skip
