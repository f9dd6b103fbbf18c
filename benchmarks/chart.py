"""Draws results as a chart: how fast skyfab is next to what each row compares with, on a logarithmic scale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.table import number
from tools.svg import Svg

MARGIN = 24
_ROW, _TOP = 46, 112
_MIDDLE, _REACH = 560, 190
"""Where a bar begins: as fast as the baseline; and the longest bar."""
_LARGEST = 10
"""The ratio at which a bar ends."""


def drawn(document: Mapping[str, Any]) -> Svg:
    """The chart of a document that `python -m benchmarks --json` writes. Results without a baseline are left out."""
    results = [result for result in document["results"] if result["baseline"]]
    bottom = _TOP + _ROW * len(results)
    notes = _notes(document, results)
    svg = Svg(798, bottom + 16 + 18 * len(notes), "skyfab's speed next to the plain tools")
    svg.text(MARGIN, 34, "skyfab next to the plain tools", bold=True, size=17)
    svg.text(MARGIN, 56, "How many times as fast; left of the line: slower. The scale is logarithmic.", colour="quiet")
    for ratio in (1 / _LARGEST, 1 / 3, 1, 3, _LARGEST):
        x = _place(ratio)
        svg.line(f"M{x:g} {_TOP - 14} V{bottom - 8}", dashed=ratio != 1)
        svg.text(x, _TOP - 20, f"{ratio:.2g}×", anchor="middle", size=12, colour="quiet")
    for place, result in enumerate(results):
        _bar(svg, _TOP + _ROW * place, result)
    for place, note in enumerate(notes):
        svg.text(MARGIN, bottom + 10 + 18 * place, note, size=12, colour="quiet")
    return svg


def _bar(svg: Svg, y: int, result: Mapping[str, Any]) -> None:
    speed = _speed(result)
    ours, baseline = (number(result[side]["median"], result["unit"]) for side in ("ours", "baseline"))
    svg.text(MARGIN, y + 8, f"{result['row']}: {result['what']}")
    svg.text(MARGIN, y + 25, f"{ours}; {result['against']}: {baseline}", size=12, colour="quiet")
    end = _place(speed)
    colour = "good" if speed >= 1 else "mark"
    svg.box(min(end, _MIDDLE), y, max(abs(end - _MIDDLE), 1), 22, fill=colour, edge=colour)
    x, anchor = (end + 6, "start") if speed >= 1 else (end - 6, "end")
    svg.text(x, y + 16, f"{speed:.2g}×", anchor=anchor, kind="over")


def _speed(result: Mapping[str, Any]) -> float:
    """How many times as fast; of rates the higher one is the faster, of times the shorter one."""
    ratio = float(result["ratio"]["median"])
    return ratio if result["unit"].endswith("/s") else 1 / ratio


def _place(ratio: float) -> float:
    part = math.log(ratio) / math.log(_LARGEST)
    return round(_MIDDLE + _REACH * max(-1.0, min(1.0, part)), 1)


def _notes(document: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> list[str]:
    facts = document["facts"]
    rows = ", ".join(dict.fromkeys(result["row"] for result in results))
    return [
        f"Measured by ./inv bench --only={rows.replace(', ', ',')} with hosts of the lab; medians.",
        f"{facts['cores']} cores, {facts['arch']}, Python {facts['python']}, {facts['ssh']}, {facts['cipher']}; "
        f"load {facts['load']:.1f} before.",
    ]
