"""`Result`: one line of the table, with the limit (bar) that it is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.sample import Sample


class Skip(Exception):
    """Raised if a row cannot be measured: the machine lacks what the row compares with."""


@dataclass(frozen=True, slots=True)
class Bar:
    """The limit of a result: of its ratio to the baseline, of its own value, or of its difference to the baseline."""

    limit: float
    sense: Literal["at most", "at least"] = "at most"
    on: Literal["ratio", "value", "difference"] = "ratio"

    def holds(self, measured: float) -> bool:
        return measured <= self.limit if self.sense == "at most" else measured >= self.limit

    @property
    def sign(self) -> str:
        return "≤" if self.sense == "at most" else "≥"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One measured quantity. Without a bar it is for information only."""

    row: str
    what: str
    unit: str
    ours: Sample
    baseline: Sample | None = None
    against: str = ""
    """What the baseline is."""
    bar: Bar | None = None

    def __post_init__(self) -> None:
        if self.bar is not None and self.bar.on != "value" and self.baseline is None:
            raise ValueError(f"{self.row}: a bar on the {self.bar.on} needs a baseline")

    @property
    def ratio(self) -> Sample | None:
        """Ours divided by the baseline, pair by pair if they were measured alternately."""
        if self.baseline is None:
            return None
        if len(self.ours.values) == len(self.baseline.values):
            return self.ours.over(self.baseline)
        return Sample.of(self.ours.median / self.baseline.median)

    @property
    def difference(self) -> Sample | None:
        """Ours minus the baseline, pair by pair as for `ratio`."""
        if self.baseline is None:
            return None
        if len(self.ours.values) == len(self.baseline.values):
            return self.ours.less(self.baseline)
        return Sample.of(self.ours.median - self.baseline.median)

    @property
    def verdict(self) -> Literal["ok", "over", ""]:
        if self.bar is None:
            return ""
        measured = {"ratio": self.ratio, "value": self.ours, "difference": self.difference}[self.bar.on]
        assert measured is not None
        return "ok" if self.bar.holds(measured.median) else "over"

    def document(self) -> dict[str, Any]:
        """The result as a JSON object."""
        return {
            "row": self.row,
            "what": self.what,
            "unit": self.unit,
            "ours": _document(self.ours),
            "against": self.against,
            "baseline": _document(self.baseline),
            "ratio": _document(self.ratio),
            "bar": None if self.bar is None else {"limit": self.bar.limit, "sense": self.bar.sense, "on": self.bar.on},
            "verdict": self.verdict,
        }


def _document(sample: Sample | None) -> dict[str, Any] | None:
    if sample is None:
        return None
    return {"median": sample.median, "noise": sample.noise, "values": list(sample.values)}
