"""A plugin of pytest: several processes share the files of tests, each takes the next one when it is through with one.

``--share=FOLDER``: the names of all files are in FOLDER/files, in the order in which they are taken. A process takes
one by making FOLDER/NUMBER, which only one of them can.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", type=Path, metavar="FOLDER")


def pytest_configure(config: pytest.Config) -> None:
    if folder := config.getoption("--share"):
        config.pluginmanager.register(Sharing(folder))


class Sharing:
    """Collects and runs one file after another."""

    def __init__(self, folder: Path) -> None:
        self._taken = taken(folder)
        self._count = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> bool:
        return True  # each file is collected when it is taken

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = self._next(session)
        while items:
            following = self._next(session)  # hosts and pools are kept for the next test, so it must be known
            for item, after in zip(items, [*items[1:], *(following[:1] or [None])], strict=True):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
                if session.shouldstop:
                    raise session.Interrupted(session.shouldstop)
            items = following
        session.testscollected = self._count
        return True

    def _next(self, session: pytest.Session) -> Sequence[pytest.Item]:
        for name in self._taken:
            items = [*session.perform_collect([name])]
            self._count += len(items)
            if items:
                return items
        return ()


def taken(folder: Path) -> Iterator[str]:
    """The files that this process takes."""
    for number, name in enumerate((folder / "files").read_text().splitlines()):
        try:
            (folder / str(number)).touch(exist_ok=False)
        except FileExistsError:
            continue
        yield name
