"""Checks the options of `Compute`."""

from __future__ import annotations

from skyfab.errors import UsageError


def check_options(*, ranks: int | str, lease: float, heartbeat_timeout: float, results: str) -> None:
    """Raises UsageError for options that no pool can have."""
    if ranks != "auto" and (type(ranks) is not int or ranks < 1):
        raise UsageError(f"ranks={ranks!r}: a number from 1 on, or 'auto'")
    if not _is_number(lease) or not _is_number(heartbeat_timeout) or not lease >= 1 or not heartbeat_timeout > 0:
        raise UsageError(f"lease={lease!r}, heartbeat_timeout={heartbeat_timeout!r}: a second at least, more than 0")
    if results not in ("any", "data"):
        raise UsageError(f"results={results!r}: 'any', or 'data' where hosts are not trusted")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
