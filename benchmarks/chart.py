"""Draws results as a chart: what skyfab takes next to what each row compares with, and the limit of that.

The chart of ``./inv bench --peers`` shows, job by job, what skyfab and each peer take.
"""

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


OURS = "skyfab"
_COLUMN, _GAP = 363, 24
"""The width of a column of jobs, of which there are two, and what is between them."""
_NAME, _LONGEST = 104, 150
"""Of a peer's name, and of the longest bar of a job."""
_LINE, _HEAD = 18, 42
_CUT = 8
"""How many times as long as skyfab's a bar can be."""


def drawn(document: Mapping[str, Any]) -> Svg:
    """The chart of a document that `python -m benchmarks --json` writes. Results without a baseline are left out."""
    if "peers" in document:
        return _peers(document)
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


def by_job(document: Mapping[str, Any]) -> dict[str, list[tuple[str, Mapping[str, Any]]]]:
    """For each job of ``--peers`` the contestants with their samples, the fastest first, skyfab among them."""
    jobs: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for result in document["results"]:
        rows = jobs.setdefault(result["row"], [(OURS, result["ours"])])
        rows.append((result["against"], result["baseline"]))
    return {job: sorted(rows, key=lambda row: float(row[1]["median"])) for job, rows in jobs.items()}


def _peers(document: Mapping[str, Any]) -> Svg:
    jobs = by_job(document)
    about = {result["row"]: result for result in document["results"]}
    heights = {job: _HEAD + _LINE * (len(rows) + len(_absent(document, job))) for job, rows in jobs.items()}
    columns = _columns(heights)
    top = 92
    bottom = top + max(sum(heights[job] for job in column) for column in columns)
    notes = _peer_notes(document)
    title = "What skyfab takes next to what you would take instead"
    svg = Svg(2 * (MARGIN + _COLUMN) + _GAP, bottom + 20 + 18 * len(notes), title)
    svg.text(MARGIN, 34, title, bold=True, size=17)
    svg.text(MARGIN, 56, "Shorter is better. Medians of one run, on the same hosts.", colour="quiet")
    for place, column in enumerate(columns):
        x, y = MARGIN + place * (_COLUMN + _GAP), top
        for job in column:
            _job(svg, x, y, about[job], jobs[job], _absent(document, job))
            y += heights[job]
    for place, note in enumerate(notes):
        svg.text(MARGIN, bottom + 16 + 18 * place, note, size=12, colour="quiet")
    return svg


def _columns(heights: Mapping[str, int]) -> tuple[list[str], list[str]]:
    """The jobs in their order, in two columns that are about as high as each other."""
    jobs = list(heights)

    def highest(split: int) -> int:
        return max(sum(heights[job] for job in part) for part in (jobs[:split], jobs[split:]))

    split = min(range(len(jobs) + 1), key=highest)
    return jobs[:split], jobs[split:]


def _absent(document: Mapping[str, Any], job: str) -> list[Mapping[str, str]]:
    return [each for each in document["missing"] if each["row"] == job]


def _job(
    svg: Svg,
    x: int,
    y: int,
    about: Mapping[str, Any],
    rows: Sequence[tuple[str, Mapping[str, Any]]],
    absent: Sequence[Mapping[str, str]],
) -> None:
    """A heading, then a bar for each contestant; those that failed are named without one."""
    what = about["what"]
    svg.text(x, y + 10, f"{what[0].upper()}{what[1:]}", bold=True, size=13)
    ours = about["ours"]["median"]
    longest = min(max(sample["median"] for _, sample in rows), _CUT * ours)
    y += 30
    for name, sample in rows:
        median = sample["median"]
        length = max(1.0, _LONGEST * min(1.0, median / longest))
        colour = "mark" if name == OURS else "line"
        svg.text(x, y, name, size=12, bold=name == OURS)
        svg.box(x + _NAME, y - 10, round(length, 1), 11, fill=colour, edge=colour)
        times = "" if name == OURS else f" · {median / ours:.2g}×" if median < 10 * ours else f" · {median / ours:.0f}×"
        if median > longest:
            times += ", cut"
        svg.text(round(x + _NAME + length + 6, 1), y, f"{number(median, about['unit'])}{times}", size=12)
        y += _LINE
    for each in absent:
        svg.text(x, y, f"{each['against']}: {_clipped(each['why'])}", size=12, colour="quiet")
        y += _LINE


def _clipped(text: str, most: int = 48) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _peer_notes(document: Mapping[str, Any]) -> list[str]:
    facts = document["facts"]
    versions = [f"{each['name']} {each['version']}" for each in document["peers"] if each["version"]]
    half = (len(versions) + 1) // 2
    absent = [f"{each['name']} does not take part: {each['why']}" for each in document["peers"] if not each["version"]]
    busy = ["The machine was busy with other work: the figures are no better than that."]
    return [
        "./inv bench --peers, with hosts of the lab. The jobs up to the process group are whole programs, timed from",
        "start to end; the others begin when all is connected. Dask, Ray and Monarch connect by plain TCP, all others",
        "by SSH.",
        f"{facts['cores']} cores, {facts['arch']}, Python {facts['python']}, {facts['ssh']}, {facts['cipher']}; "
        f"load {facts['load']:.1f} before.",
        *(busy if facts["load"] > facts["cores"] else []),
        ", ".join(versions[:half]) + ",",
        ", ".join(versions[half:]) + ".",
        *(_clipped(text, 110) for text in [*absent, *document["notes"]]),
    ]
