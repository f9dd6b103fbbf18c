"""`skyfab prepare`: builds an environment on hosts in advance, and optionally writes its lock file."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from skyfab.calls.image import Image, PipIndex
from skyfab.cli.fanout import load
from skyfab.env import facts_cache, probe
from skyfab.env.facts import Target
from skyfab.env.lock import Lock, make_lock
from skyfab.env.prepare import Preparation
from skyfab.env.uv import described, write_whole
from skyfab.errors import PoolError, SkyfabError, UsageError
from skyfab.inventory.host import Host
from skyfab.inventory.inventory import Inventory
from skyfab.pool.compute import Compute
from skyfab.session.bootstrap import local_python, open_shell
from skyfab.session.transport import transport_for
from skyfab.ui.events import Event, HostState
from skyfab.ui.screen import table


def prepare(
    selection: str | None, inventory: str | None, image: Image, *, upgrade: bool = False, lock: str | None = None
) -> None:
    """Builds the image's environment on the selected hosts, and prints a table with the outcome.

    With `lock`, writes the pylock.toml that the image resolves to. Raises the hosts' errors, after the table, and
    UsageError if the hosts need different locks.
    """
    found = load(inventory)
    hosts = found.select(selection)
    if lock is not None and not image.pip:
        raise UsageError("--lock writes down packages, and there are none", hint="name some: --pip=numpy")
    if upgrade:
        _look_for_newer(image, hosts, found)
    pool = Compute(hosts, inventory=found, image=image)
    clock = _Clock()
    pool.events.subscribe(clock)
    try:
        with pool:
            pass
    except SkyfabError as error:
        failed = {one.host: one for one in _parts(error)}
        if None in failed:  # not the error of a host
            raise
        _show(hosts, image, clock, failed)
        raise
    _show(hosts, image, clock, {})
    if lock is not None:
        _write(Path(lock), image, hosts)


def _parts(error: SkyfabError) -> list[SkyfabError]:
    found = error.exceptions if isinstance(error, PoolError) else [error]
    return [one for one in found if isinstance(one, SkyfabError)]


class _Clock:
    """Measures how long each host takes."""

    def __init__(self) -> None:
        self._began: dict[str, float] = {}
        self.seconds: dict[str, float] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, HostState) and event.state == "connecting":
            self._began[event.host] = time.monotonic()
        elif isinstance(event, HostState) and event.state in ("ready", "failed"):
            self.seconds[event.host] = time.monotonic() - self._began.get(event.host, time.monotonic())


# ---- the result


@dataclass(frozen=True, slots=True)
class _Made:
    """What an image resolves to on one host."""

    host: Host
    target: Target
    lock: Lock
    digest: str


def _made(image: Image, hosts: Sequence[Host]) -> dict[str, _Made]:
    """What the pool used: the facts about the hosts, and the locks made for them, are cached."""
    plan = Preparation(image, hosts, local_python())
    facts = [(host, facts_cache.load(host)) for host in hosts if not plan.is_empty]
    targets = [(host, Target.of(said, plan.python)) for host, said in facts if said is not None]
    for host, target in targets:
        plan.meet(host, target)
    locks = [(host, target, plan.lock(target, only_known=True)) for host, target in targets]
    return {host.name: _Made(host, target, lock, plan.digest(lock)) for host, target, lock in locks if lock is not None}


def _show(hosts: Sequence[Host], image: Image, clock: _Clock, failed: dict[str | None, SkyfabError]) -> None:
    rows = []
    made = _made(image, hosts)
    for host in hosts:
        one, error = made.get(host.name), failed.get(host.name)
        took = f"{clock.seconds.get(host.name, 0.0):.1f}"
        if error is not None:
            rows.append((host.name, "–", "–", took, error.message.partition("\n")[0]))
        else:
            has = (one.digest[:12], str(len(one.lock.wheels))) if one else ("–", "–")
            rows.append((host.name, *has, took, "ready"))
    table(("host", "environment", "packages", "seconds", "state"), rows, right=("packages", "seconds"))


def _write(path: Path, image: Image, hosts: Sequence[Host]) -> None:
    groups: dict[str, list[_Made]] = {}
    for one in _made(image, hosts).values():
        groups.setdefault(one.lock.text, []).append(one)
    if len(groups) != 1:
        told = [f"  {','.join(one.host.name for one in group)}: {_kinds(group)}" for group in groups.values()]
        raise UsageError(
            "\n".join(["these hosts take different packages, and one lock is not for all of them", *told]),
            hint="a lock for each: skyfab prepare --hosts=… --lock=…",
        )
    (text,) = groups
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
    print(f"{path}: {len(groups[text][0].lock.wheels)} packages; to be used with Image(lock={str(path)!r})")


def _kinds(group: Sequence[_Made]) -> str:
    """Describes the hosts of a group, as far as packages depend on it."""
    found = []
    for one in group:
        gpus = f", NVIDIA driver {one.target.driver}" if one.target.driver else ""
        found.append(described(one.target) + (gpus or (f", ROCm {one.target.rocm}" if one.target.rocm else "")))
    return "; ".join(dict.fromkeys(found))


# ---- newer versions


def _look_for_newer(image: Image, hosts: Sequence[Host], inventory: Inventory) -> None:
    """Resolves again for each kind of host; the pool then uses the new locks. The pool reports unreachable hosts."""

    def target(host: Host) -> Target | None:
        try:
            with open_shell(host, transport_for(host, inventory)) as shell:
                facts = probe.parse(shell.run(probe.script(())))
        except SkyfabError:
            return None
        facts_cache.remember(host, facts)
        return Target.of(facts, local_python())

    with ThreadPoolExecutor(min(64, max(1, len(hosts)))) as threads:
        together = sorted({found for found in threads.map(target, hosts) if found is not None}, key=repr)
    for one in together:
        make_lock(image, one, together=together, upgrade=True)


# ---- options

_INSTALL: Final[dict[str, Literal["auto", "push", "fetch"]]] = {"auto": "auto", "push": "push", "fetch": "fetch"}


def image_of(
    pip: Sequence[str], index: Sequence[str], requirements: str | None, apt: Sequence[str], install: str
) -> Image:
    """The image for the options. Raises UsageError."""
    wanted = [one for text in pip for one in _requirements(text)]
    if requirements is not None:
        wanted += _listed(Path(requirements))
    if install not in _INSTALL:
        raise UsageError(f"--install={install}", hint="auto, push or fetch")
    return Image(
        pip=tuple(wanted),
        pip_indexes=tuple(map(_index, index)),
        apt=tuple(name for text in apt for name in re.split(r"[,\s]+", text.strip()) if name),
        excludes=("*",),  # nothing of the caller's project is needed
        install=_INSTALL[install],
    )


def _requirements(text: str) -> list[str]:
    """Splits at commas that are followed by a new name.

    >>> _requirements("numpy>=1,<2,uvicorn[standard,x], torch")
    ['numpy>=1,<2', 'uvicorn[standard,x]', 'torch']
    """
    parts = re.split(r",(?![^\[]*\])(?=\s*[A-Za-z0-9])", text)
    return [part for part in (part.strip(", \t\n") for part in parts) if part]


def _listed(path: Path) -> list[str]:
    """The requirements in a file. Raises UsageError if it cannot be read or has options."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in text.replace("\\\n", " ").splitlines()]
    for line in lines:
        if line.startswith("-"):
            raise UsageError(f"{path}: it may have requirements only, not {line!r:.80}", hint="--index=URL=packages")
    return [line for line in lines if line]


def _index(text: str) -> PipIndex:
    url, _, packages = text.rpartition("=")
    names = tuple(name for name in re.split(r"[,\s]+", packages.strip()) if name)
    if "://" not in url or not names:
        raise UsageError(f"--index={text}", hint="--index=https://download.example/simple=torch,torchvision")
    return PipIndex(url, names)
