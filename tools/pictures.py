"""Draws the pictures of the documentation: each docs/pictures/NAME.toml as NAME.svg.

python -m tools.pictures
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from skyfab._util import toml
from skyfab.session.state import NEXT
from tools.svg import Svg

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"

MARGIN = 24


def main() -> None:
    for source in sorted(FOLDER.glob("*.toml")):
        drawn(source).write(source.with_suffix(".svg"))


def drawn(source: Path) -> Svg:
    """The picture that a file describes."""
    data = toml.loads(source.read_text(encoding="utf-8"))
    return {"sequence": sequence, "states": states, "table": table}[data["kind"]](data)


def sequence(data: dict[str, Any]) -> Svg:
    """Actors side by side, messages between them from top to bottom."""
    column, row, top = 152, 36, 92
    actors, steps = data["actors"], data["steps"]
    bottom = top + row * len(steps)
    svg = Svg(column * len(actors) + 2 * MARGIN, bottom + MARGIN, data["title"])
    svg.text(MARGIN, 34, data["title"], bold=True, size=17)
    places = [MARGIN + column * (number + 0.5) for number in range(len(actors))]
    for x, actor in zip(places, actors, strict=True):
        svg.line(f"M{x:g} {top - 14} V{bottom}", dashed=True)
        svg.box(x - column / 2 + 6, top - 40, column - 12, 28)
        svg.text(x, top - 21, actor, anchor="middle", bold=True)
    for number, (start, end, text, *how) in enumerate(steps):
        first, last, y = places[start], places[end], top + row * number + 26
        if start == end:
            svg.box(first - column / 2 + 6, y - 18, 7.4 * len(text) + 20, 26, edge="mark")
            svg.text(first - column / 2 + 16, y, text)
            continue
        reach = 4 if last > first else -4
        path = f"M{first + reach:g} {y} H{last - reach:g}"
        svg.line(path, colour="mark", dashed="dashed" in how, arrow="both" if "both" in how else "end")
        svg.text(first + 2 * reach, y - 6, text, size=13, kind="over", anchor="start" if last > first else "end")
    return svg


def states(data: dict[str, Any]) -> Svg:
    """States as boxes on a grid. The arrows are those that the code allows."""
    column, row = 166, 112
    svg = Svg(column * 4 + BOX[0] + 2 * MARGIN, 438, data["title"])
    svg.text(MARGIN, 34, data["title"], bold=True, size=17)
    places = {name: (MARGIN + column * x, 24 + row * y) for name, (x, y) in data["states"].items()}
    assert set(places) == {state.name for state in NEXT}, "states.toml has other states than skyfab/session/state.py"
    labels = dict(data["labels"])
    arrows = [(state.name, other.name) for state, following in NEXT.items() for other in following]
    for start, end in sorted(
        arrows, key=lambda arrow: (" ".join(arrow) in data["labels"], arrow)
    ):  # labels lie over lines
        _arrow(svg, places[start], places[end], labels.pop(f"{start} {end}", ""))
    assert not labels, f"no such arrows: {labels}"
    for name, (x, y) in places.items():
        svg.box(x, y, *BOX, edge={"OPEN": "good", "LOST": "bad"}.get(name, "line"))
        svg.text(x + BOX[0] / 2, y + 26, name, anchor="middle", bold=True)
    return svg


BOX = (112, 42)
"""Width and height of a state."""


def _arrow(svg: Svg, start: tuple[int, int], end: tuple[int, int], label: str) -> None:
    """Between neighbours of a row straight, one line each way; over others as an arc; between rows straight."""
    (x1, y1), (x2, y2), (width, height) = start, end, BOX
    colour = "mark" if label else "line"
    x, y = (x1 + x2 + width) / 2, y1 - 8.0
    if y1 != y2:
        lean = (x2 - x1) / 9
        path = f"M{x1 + width / 2 + lean:g} {y1 + height} L{x2 + width / 2 - lean:g} {y2}"
        y = (y1 + height + y2) / 2 + 8
    elif abs(x2 - x1) > 2 * width:
        rise = (x2 - x1) // 6
        left, right = x1 + width * 0.4, x2 + width * 0.6
        path = f"M{left:g} {y1} C{left:g} {y1 - rise} {right:g} {y1 - rise} {right:g} {y2}"
    elif x1 < x2:
        path = f"M{x1 + width} {y1 + 15} H{x2}"
    else:
        path = f"M{x1} {y1 + 28} H{x2 + width}"
        y = y1 + height + 16
    svg.line(path, colour=colour, arrow="end")
    if label:
        svg.text(x, y, label, anchor="middle", size=12, colour="mark", kind="over")


def table(data: dict[str, Any]) -> Svg:
    """Events against things, with a sign in each cell: what goes on is green, what ends is red."""
    row, top = 34, 92
    places = [MARGIN + 244, MARGIN + 528]
    svg = Svg(798, top + row * (len(data["rows"]) + 1) + MARGIN // 2, data["title"])
    svg.text(MARGIN, 34, data["title"], bold=True, size=17)
    for x, column in zip(places, data["columns"], strict=True):
        svg.text(x, top - 16, column, bold=True)
    for number, (event, cells) in enumerate(data["rows"].items()):
        y = top + row * number
        svg.line(f"M{MARGIN} {y - 6} H{svg.width - MARGIN}")
        svg.text(MARGIN, y + 16, event)
        for x, cell in zip(places, cells, strict=True):
            shown, colour = {"+": ("✓", "good"), "-": ("✕", "bad"), "~": ("↻", "mark")}[cell[0]]
            svg.text(x, y + 16, shown, colour=colour, bold=True)
            svg.text(x + 20, y + 16, cell[2:])
    y = top + row * len(data["rows"])
    svg.line(f"M{MARGIN} {y - 6} H{svg.width - MARGIN}")
    svg.text(MARGIN, y + 18, data["note"], colour="quiet")
    return svg


if __name__ == "__main__":
    main()
