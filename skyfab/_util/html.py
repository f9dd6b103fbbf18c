"""How values are shown in a notebook: a base class whose `_repr_html_` is a small table."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


class ShownAsTable:
    """Base of values that notebooks show as a table: `_table` gives its head and rows, `repr` its caption."""

    __slots__ = ()

    def _table(self) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
        raise NotImplementedError

    def _repr_html_(self) -> str:
        head, rows = self._table()
        lines = [_row("th", head), *(_row("td", row) for row in rows)]
        return f"<table><caption>{escape(repr(self))}</caption>{''.join(lines)}</table>"


def _row(kind: str, cells: Sequence[object]) -> str:
    return f"<tr>{''.join(f'<{kind}>{escape(str(cell))}</{kind}>' for cell in cells)}</tr>"
