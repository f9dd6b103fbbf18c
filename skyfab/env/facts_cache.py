"""Caches the facts about each host on this machine. They may be outdated and are verified before they are relied on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from skyfab._util import atomic
from skyfab._util.cache import cache_folder
from skyfab.env.facts import Facts, Gpu, Program
from skyfab.inventory.host import Host
from skyfab.protocol.blobs import name_of


def load(host: Host) -> Facts | None:
    """Returns the facts of the last probe; None if there are none."""
    try:
        return _facts(json.loads(_file(host).read_text()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def remember(host: Host, facts: Facts) -> None:
    """Stores the facts. If that fails, the next start only takes longer."""
    try:
        atomic.write(_file(host), json.dumps(dataclasses.asdict(facts)))
    except OSError:
        pass


def _file(host: Host) -> Path:
    words = (host.transport == "local", host.user, host.address or host.name, host.port, host.cache)
    place = "\0".join(map(str, words))
    return cache_folder() / "hosts" / f"{name_of(place.encode())[:32]}.json"


def _facts(document: dict[str, Any]) -> Facts:
    uv = document.pop("uv")
    return Facts(
        **{
            **document,
            "pythons": tuple(Program(**each) for each in document["pythons"]),
            "uv": None if uv is None else Program(**uv),
            "gpus": tuple(Gpu(**each) for each in document["gpus"]),
            "reachable": tuple(document["reachable"]),
        }
    )
