"""``python -m benchmarks``: measure, print the table. The bars are reported, not enforced."""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

from benchmarks import chart, table
from benchmarks.arena import Arena
from benchmarks.facts import Facts
from benchmarks.result import Result, Skip
from benchmarks.rows import ON_REQUEST, ROWS, Row
from benchmarks.scale import TASTE, Scale
from skyfab.errors import UsageError


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 whatever the figures are; 1 if a row crashed; 2 if this machine cannot run a lab."""
    options = _parser().parse_args(argv)
    scale = TASTE if options.quick else Scale()
    if options.size:
        scale = replace(scale, size=options.size)
    rows = [row for row in (*ROWS, *ON_REQUEST) if row.name in options.only] if options.only else list(ROWS)
    try:
        with Arena.open(scale) as arena:
            facts = Facts.of(arena)
            results, notes = measure(rows, arena)
    except UsageError as error:  # this machine cannot run a lab
        print(f"error: {error}", file=sys.stderr)
        return 2
    table.show(results, [*notes, str(facts)])
    document = {"facts": facts.document(), "results": [result.document() for result in results], "notes": notes}
    written = options.json or (options.chart and options.chart.with_suffix(".json"))
    if written:
        written.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    if options.chart:
        chart.drawn(document).write(options.chart)
    return 1 if any("crashed" in note for note in notes) else 0


def measure(rows: list[Row], arena: Arena) -> tuple[list[Result], list[str]]:
    """The results of all rows, and a note for each row that was skipped or crashed. A crash stops no other row.

    Ctrl-C ends it with what there is.
    """
    results: list[Result] = []
    notes: list[str] = []
    for row in rows:
        print(f"{row.name}: {row.about}", file=sys.stderr)
        started = time.monotonic()
        try:
            results.extend(row.run(arena))
        except Skip as reason:
            notes.append(f"{row.name} skipped: {reason}")
        except KeyboardInterrupt:
            notes.append(f"{row.name} interrupted")
            break
        except Exception as error:
            traceback.print_exc()
            notes.append(f"{row.name} crashed: {type(error).__name__}: {error}")
        print(f"  {time.monotonic() - started:.0f} s", file=sys.stderr)
    return results, notes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", metavar="NAMES", type=_names, help="one row, or several with commas")
    parser.add_argument("--size", type=int, metavar="MIB", help="of the large tensor (default: 512)")
    parser.add_argument("--quick", action="store_true", help="a taste of everything, in seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--chart", type=Path, metavar="FILE.svg", help="draw the results there, and write FILE.json")
    return parser


def _names(text: str) -> list[str]:
    """The names of rows. Raises ArgumentTypeError."""
    known = [row.name for row in (*ROWS, *ON_REQUEST)]
    names = text.split(",")
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"there is no row {name!r}; there are: {', '.join(known)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
