"""Draws results as a chart: what skyfab takes next to what each row compares with, and the limit of that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.table import number
from tools.svg import Svg

MARGIN = 24
_ROW, _TOP = 46, 104
_LEFT, _UNIT = 350, 88
"""Where bars begin, and the length of one that is as long as its baseline."""
_LARGEST = 4
"""The ratio at which a bar is cut."""


def drawn(document: Mapping[str, Any]) -> Svg:
    """The chart of a document that `python -m benchmarks --json` writes. Results without a baseline are left out."""
    results = [result for result in document["results"] if result["baseline"]]
    bottom = _TOP + _ROW * len(results)
    notes = _notes(document, results)
    svg = Svg(798, bottom + 16 + 18 * len(notes), "What skyfab takes next to the plain tools")
    svg.text(MARGIN, 34, "What skyfab takes next to the plain tools", bold=True, size=17)
    svg.text(MARGIN, 56, "The plain tool takes 1. Shorter is better; a vertical stroke is the limit.", colour="quiet")
    for ratio in range(_LARGEST + 1):
        x = _LEFT + _UNIT * ratio
        svg.line(f"M{x} {_TOP - 10} V{bottom - 8}", dashed=ratio != 1)
        svg.text(x, _TOP - 16, f"{ratio}×", anchor="middle", size=12, colour="quiet")
    for place, result in enumerate(results):
        _bar(svg, _TOP + _ROW * place, result)
    for place, note in enumerate(notes):
        svg.text(MARGIN, bottom + 12 + 18 * place, note, size=12, colour="quiet")
    return svg


def _bar(svg: Svg, y: int, result: Mapping[str, Any]) -> None:
    ours, baseline = (number(result[side]["median"], result["unit"]) for side in ("ours", "baseline"))
    svg.text(MARGIN, y + 8, f"{result['row']}: {result['what']}")
    svg.text(MARGIN, y + 25, f"{ours}; {result['against']}: {baseline}", size=12, colour="quiet")
    taken = _taken(result, result["ratio"]["median"])
    length = _UNIT * min(taken, _LARGEST)
    colour = "good" if taken <= 1 else "mark"
    svg.box(_LEFT, y, round(length, 1), 22, fill=colour, edge=colour)
    bar = result["bar"]
    if bar and bar["on"] == "ratio" and (limit := _taken(result, bar["limit"])) <= _LARGEST:
        svg.line(f"M{_LEFT + _UNIT * limit:g} {y - 3} V{y + 25}", colour="bad")
    noise = f" ±{result['ratio']['noise']:.0%}" if len(result["ratio"]["values"]) > 1 else ""
    svg.text(round(_LEFT + length + 6, 1), y + 16, f"{taken:.2f}×{noise}", kind="over", size=12)


def _taken(result: Mapping[str, Any], ratio: float) -> float:
    """A ratio of times; where rates were measured, their inverse is that."""
    return 1 / ratio if result["unit"].endswith("/s") else ratio


def _notes(document: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> list[str]:
    facts = document["facts"]
    rows = ",".join(dict.fromkeys(result["row"] for result in results))
    busy = ["The machine was busy with other work: the figures are no better than that."]
    return [
        f"Some of the rows: ./inv bench --only={rows}, with hosts of the lab; medians.",
        f"{facts['cores']} cores, {facts['arch']}, Python {facts['python']}, {facts['ssh']}, {facts['cipher']}; "
        f"load {facts['load']:.1f} before.",
        *(busy if facts["load"] > facts["cores"] else []),
        *document["notes"],
    ]
