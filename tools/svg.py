"""`Svg`: a picture as text, readable on a light and on a dark page. It names its colours by what they mean."""

from __future__ import annotations

from html import escape
from pathlib import Path

_STYLE = """\
svg { --paper: #ffffff; --ink: #1f2328; --quiet: #59636e; --line: #8c959f; --box: #f3f5f8;
 --good: #1a7f37; --bad: #cf222e; --mark: #0969da; }
@media (prefers-color-scheme: dark) { svg { --paper: #161b22; --ink: #e6edf3; --quiet: #9198a1; --line: #6e7681;
 --box: #21262d; --good: #3fb950; --bad: #f85149; --mark: #58a6ff; } }
text { font-family: system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 14px;
 paint-order: stroke; stroke: var(--halo, none); stroke-width: 4px; stroke-linejoin: round; }
.over { --halo: var(--paper); }
.code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
"""


class Svg:
    """Elements are added in the order in which they are painted. `title` is what screen readers say."""

    def __init__(self, width: int, height: int, title: str, style: str = "") -> None:
        self.width = width
        self.height = height
        self._style = f"{_STYLE}{style}"
        self._title = title
        self._body: list[str] = []

    def add(self, element: str) -> None:
        self._body.append(element)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        colour: str = "ink",
        anchor: str = "start",
        size: int = 14,
        bold: bool = False,
        kind: str = "",
    ) -> None:
        """`y` is the base line; `anchor` says which part of the text is at `x`: start, middle or end.

        `kind` is "code", or "over" for text that lies over lines.
        """
        weight = ' font-weight="600"' if bold else ""
        classes = f' class="{kind}"' if kind else ""
        style = f'style="font-size:{size}px;fill:var(--{colour})"'
        place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}"'
        self.add(f"<text {place} {style}{weight}{classes}>{escape(text, quote=False)}</text>")

    def box(self, x: float, y: float, width: float, height: float, *, fill: str = "box", edge: str = "line") -> None:
        style = f'style="fill:var(--{fill});stroke:var(--{edge})"'
        self.add(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" {style}/>')

    def line(self, path: str, *, colour: str = "line", dashed: bool = False, arrow: str = "") -> None:
        """`path` as in the attribute d; an arrow may be at its "end" or at "both" ends."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        head = f' marker-end="url(#{colour})"' if arrow else ""
        head += f' marker-start="url(#{colour})"' if arrow == "both" else ""
        self.add(f'<path d="{path}" style="fill:none;stroke:var(--{colour});stroke-width:1.5"{dash}{head}/>')

    def __str__(self) -> str:
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
                f"<title>{escape(self._title, quote=False)}</title>",
                f"<style>{self._style}</style>",
                *(_head(colour) for colour in ("line", "mark", "good", "bad") if self._has_head(colour)),
                f'<rect width="{self.width}" height="{self.height}" rx="8" style="fill:var(--paper)"/>',
                *self._body,
                "</svg>\n",
            ]
        )

    def _has_head(self, colour: str) -> bool:
        return any(f"url(#{colour})" in element for element in self._body)

    def write(self, path: Path) -> None:
        path.write_text(str(self), encoding="utf-8")


def _head(colour: str) -> str:
    place = 'viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" orient="auto-start-reverse"'
    return f'<marker id="{colour}" {place}><path d="M0 1 10 5 0 9z" style="fill:var(--{colour})"/></marker>'
