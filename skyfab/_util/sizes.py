"""Numbers as people read and type them: sizes in bytes, counts with their nouns, durations."""

from __future__ import annotations

import re

_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def readable(size: int) -> str:
    """A number of bytes, in the unit that is easiest to read.

    >>> readable(1), readable(12), readable(3456), readable(999_999), readable(123_456_789), readable(4_200_000_000)
    ('1 byte', '12 bytes', '3.5 kB', '1.0 MB', '123 MB', '4.2 GB')
    """
    unit, scale = _unit(size)
    return f"{size} byte{'' if size == 1 else 's'}" if scale == 1 else f"{_number(size / scale)} {unit}"


def counted(count: int, noun: str, nouns: str = "") -> str:
    """How many there are; `nouns` is the plural, if it is not formed with an s.

    >>> counted(1, "rank"), counted(1200, "rank"), counted(2, "batch", "batches")
    ('1 rank', '1,200 ranks', '2 batches')
    """
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"


def progress(done: int, total: int) -> str:
    """How many bytes of a total are done, in the unit of the total, which is 0 if it is not known.

    >>> progress(0, 12), progress(61_400_000, 155_000_000), progress(400_000, 4_200_000), progress(61_400_000, 0)
    ('0 of 12 bytes', '61 of 155 MB', '0.4 of 4.2 MB', '61 MB')
    """
    if not total:
        return readable(done)
    _, scale = _unit(total)
    return f"{done if scale == 1 else _number(done / scale)} of {readable(total)}"


def seconds_of(text: str) -> int | None:
    """How many seconds a text means; None if it is not a duration.

    >>> seconds_of("90s"), seconds_of("8h"), seconds_of("8 hours")
    (90, 28800, None)
    """
    number, unit = text[:-1], text[-1:]
    is_number = number.isascii() and number.isdigit() and len(number) < 10
    return int(number) * _SECONDS[unit] if is_number and unit in _SECONDS else None


def rate_of(text: str) -> float | None:
    """How many bytes per second a text means; None if it is not a rate.

    >>> rate_of("20MB/s"), rate_of("0.5GB/s"), rate_of("20Mbit")
    (20000000.0, 500000000.0, None)
    """
    found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)(GB|MB|kB)/s", text)
    return float(found[1]) * dict(_UNITS)[found[2]] if found else None


def _unit(size: int) -> tuple[str, float]:
    """The unit, and how many bytes it has: the largest in which the number, as it is rounded, is at least 1."""
    return next((one for one in _UNITS if size >= 0.9995 * one[1]), ("bytes", 1))


def _number(value: float) -> str:
    return f"{value:.{0 if round(value, 1) >= 10 else 1}f}"
