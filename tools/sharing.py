"""A plugin of pytest: several processes share the files of tests, each takes the next one when it is through with one.

``--share=FOLDER``: the names of all files are in FOLDER/files, in the order in which they are taken. A process takes
one by making FOLDER/NUMBER, which only one of them can. Tests that have failed are named in FOLDER/failed at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", type=Path, metavar="FOLDER")


def pytest_configure(config: pytest.Config) -> None:
    if folder := config.getoption("--share"):
        config.pluginmanager.register(Sharing(folder))


class Sharing:
    """Imports and runs one file after another."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._modules: dict[Path, pytest.Collector] = {}
        self._taken = taken(folder)
        self._count = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> bool:
        session.perform_collect(names(self._folder), genitems=False)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """The first time it is all files, not imported yet; later the tests of one."""
        if not self._modules:
            self._modules = {module.path: module for module in items}
            items.clear()

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

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            with (self._folder / "failed").open("a") as file:
                file.write(f"{report.nodeid}\n")

    def _next(self, session: pytest.Session) -> Sequence[pytest.Item]:
        for name in self._taken:
            module = self._modules[session.config.invocation_params.dir / name]
            items = [*session.genitems(module)]
            session.config.hook.pytest_collection_modifyitems(session=session, config=session.config, items=items)
            self._count += len(items)
            if items:
                return items
        return ()


def names(folder: Path) -> list[str]:
    return (folder / "files").read_text().splitlines()


def taken(folder: Path) -> Iterator[str]:
    """The files that this process takes."""
    for number, name in enumerate(names(folder)):
        try:
            (folder / str(number)).touch(exist_ok=False)
        except FileExistsError:
            continue
        yield name
