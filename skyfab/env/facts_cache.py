"""Caches the facts about each host on this machine. They may be outdated and are verified before they are relied on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TypeVar

from skyfab._util import atomic, schema
from skyfab._util.cache import cache_folder
from skyfab.env.facts import Facts
from skyfab.env.probe import parse, script
from skyfab.inventory.host import Host
from skyfab.protocol.blobs import name_of
from skyfab.session.shell import Shell

T = TypeVar("T")


def load(host: Host) -> Facts | None:
    """Returns the facts of the last probe; None if there are none."""
    return read(host, "hosts", Facts)


def probe(host: Host, shell: Shell) -> Facts:
    """Probes a host, and stores the facts."""
    facts = parse(shell.run(script()))
    store(host, "hosts", dataclasses.asdict(facts))
    return facts


def read(host: Host, folder: str, kind: type[T]) -> T | None:
    """What was stored about a host in this folder of the cache; None if there is nothing, or nothing valid."""
    try:
        return schema.parse(kind, json.loads(_file(host, folder).read_text()))
    except (OSError, ValueError):
        return None


def store(host: Host, folder: str, value: object) -> None:
    """Stores JSON data about a host. If that fails, the next start only takes longer."""
    try:
        atomic.write(_file(host, folder), json.dumps(value))
    except OSError:
        pass


def _file(host: Host, folder: str) -> Path:
    words = (host.transport == "local", host.user, host.address or host.name, host.port, host.cache)
    place = "\0".join(map(str, words)) + host.inside
    return cache_folder() / folder / f"{name_of(place.encode())[:32]}.json"
