"""Caches the facts about each host on this machine. They may be outdated and are verified before they are relied on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from skyfab._util import atomic, schema
from skyfab._util.cache import cache_folder
from skyfab.env.facts import Facts
from skyfab.inventory.host import Host
from skyfab.protocol.blobs import name_of


def load(host: Host) -> Facts | None:
    """Returns the facts of the last probe; None if there are none."""
    try:
        return schema.parse(Facts, json.loads(_file(host).read_text()))
    except (OSError, ValueError):
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
