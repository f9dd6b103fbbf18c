"""The benchmark's arithmetic and its table are right, and every row runs on the lab. Speed itself is not tested."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import __main__ as program
from benchmarks import table
from benchmarks.arena import Arena
from benchmarks.result import Bar, Result, Skip
from benchmarks.rows import ON_REQUEST, ROWS, Row
from benchmarks.sample import Sample, alternate
from benchmarks.scale import TASTE
from skyfab.lab import Lab

ROOT = Path(__file__).resolve().parent.parent

# ---- statistics


def test_noise_is_half_the_distance_between_the_quartiles() -> None:
    sample = Sample.of(1, 2, 3, 4, 5)
    assert sample.median == 3
    assert sample.noise == pytest.approx(1 / 3)


def test_a_machine_that_slows_down_does_not_change_the_ratio() -> None:
    baseline = Sample.of(1, 2, 4, 8)
    ours = baseline.each(lambda value: 3 * value)
    assert ours.over(baseline).median == 3
    assert ours.over(baseline).noise == 0


def test_measures_take_turns_and_none_is_always_first() -> None:
    order: list[str] = []

    def measure(name: str, value: float) -> float:
        order.append(name)
        return value

    a, b = alternate(3, lambda: measure("a", 1), lambda: measure("b", 2))
    assert "".join(order) == "abbaab"
    assert a.values == (1, 1, 1)
    assert b.values == (2, 2, 2)


# ---- results


def result(**changes: object) -> Result:
    figures = {"unit": "ms", "ours": Sample.of(0.3, 0.3), "baseline": Sample.of(0.1, 0.1)}
    rest = {"row": "warm", "what": "no-op", "against": "echo", "bar": Bar(3.1)}
    return Result(**{**figures, **rest, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bar", "verdict"),
    [
        (Bar(3.1), "ok"),
        (Bar(2.9, "at least"), "ok"),
        (Bar(3.1, "at least"), "over"),
        (Bar(0.3, on="value"), "ok"),
        (Bar(0.19, on="difference"), "over"),
        (None, ""),
    ],
)
def test_verdict(bar: Bar | None, verdict: str) -> None:
    assert result(bar=bar).verdict == verdict


# ---- the table


def test_the_table_is_aligned_text() -> None:
    bar = Bar(1.3, on="value")
    memory = result(row="bulk", what="memory here", unit="GiB", ours=Sample.of(1.5), baseline=None, bar=bar)
    more = result(what="no-op again", bar=Bar(0.1, on="difference"))
    lines = table.text([result(), result(what="longer than that", bar=None), more, memory])
    assert lines == [
        "row   measured                  ours             baseline      ratio              bar",
        "warm  no-op             0.300 ms ±0%  0.100 ms ±0% (echo)  3.00× ±0%          ≤ 3.10×  ok",
        "warm  longer than that  0.300 ms ±0%  0.100 ms ±0% (echo)  3.00× ±0%",
        "warm  no-op again       0.300 ms ±0%  0.100 ms ±0% (echo)  3.00× ±0%  ≤ 0.100 ms more  over",
        "bulk  memory here           1.50 GiB                                       ≤ 1.30 GiB  over",
    ]


# ---- the program


class Fails:
    name, about = "fails", "a row that breaks"

    def run(self, arena: Arena) -> Iterator[Result]:
        yield result(row="fails")
        raise RuntimeError("no such luck")


class Lacks:
    name, about = "lacks", "a row that cannot be measured"

    def run(self, arena: Arena) -> Iterator[Result]:
        raise Skip("execnet is not installed")
        yield


class Works:
    name, about = "works", "a row"

    def run(self, arena: Arena) -> Iterator[Result]:
        yield result(row="works")


def test_a_row_that_breaks_does_not_stop_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    results, notes = program.measure([Fails(), Lacks(), Works()], None)  # type: ignore[arg-type]
    assert [found.row for found in results] == ["fails", "works"]
    assert notes == ["fails crashed: RuntimeError: no such luck", "lacks skipped: execnet is not installed"]
    assert "no such luck" in capsys.readouterr().err


# ---- memory

needs_proc = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="no /proc here")


@needs_proc
def test_the_peak_counts_what_was_held_for_a_moment_only() -> None:
    """In a process of its own: threads of this one may free more meanwhile than the block takes."""
    program = """if True:
        from benchmarks.memory import OwnPeak
        with OwnPeak() as peak:
            block = bytearray(b"x") * (64 << 20)
            del block
        print(peak.above)
    """
    said = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    assert 60 << 20 < int(said) < 80 << 20


# ---- on the lab

QUICK = ("warm", "map", "output")
"""Rows that take seconds; the soak runs all of them."""


@pytest.mark.lab
@pytest.mark.timeout(300)  # DDP starts a dozen processes that import torch
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=[] if row.name in QUICK else pytest.mark.soak, id=row.name)
        for row in (*ROWS, *ON_REQUEST)
    ],
)
def test_a_taste_of_every_row(row: Row, lent_lab: Lab) -> None:
    try:
        results = list(row.run(Arena.on(lent_lab, TASTE)))
    except Skip as reason:
        pytest.skip(str(reason))
    assert results
    assert all(found.row == row.name and found.ours.median >= 0 for found in results)
    assert table.text(results)
