"""An index that no host can reach, and hosts on which nothing has been installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from stage.index import Index, isolate_uv

import skyfab as sky
from skyfab.lab import Lab

_caches = count(1)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """uv sees nothing of this machine's settings and caches."""
    isolate_uv(tmp_path, monkeypatch)


@pytest.fixture
def index(world: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """The default index, which no host can reach."""
    with Index(tmp_path / "index") as found:
        monkeypatch.setenv("PIP_INDEX_URL", found.url)
        yield found


@pytest.fixture
def fresh(namespaces: Lab, hosts_of: Callable[..., list[sky.Host]]) -> Iterator[Callable[..., list[sky.Host]]]:
    """``fresh("openssh", 2)``: hosts on which nothing has been installed; they find an interpreter themselves."""
    made: list[str] = []

    def hosts(transport: str = "openssh", number: int = 1, **changes: object) -> list[sky.Host]:
        cache = f"/var/tmp/skyfab cache {next(_caches)}"
        made.append(cache)
        return hosts_of(transport, number, **{"cache": cache, "python": "auto", **changes})

    yield hosts
    for host in namespaces.hosts:
        for cache in made:
            host.run(["sh", "-c", f"umount '{cache}' 2>/dev/null; rm -rf '{cache}'"])
