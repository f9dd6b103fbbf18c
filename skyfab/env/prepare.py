"""Prepares an image's environment on each host of a pool: probe, lock, upload, install, start the interpreter.

A host is first asked to start the environment that it should already have, according to its cached facts. Only if that
does not exist, it is prepared.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from shlex import quote
from typing import TYPE_CHECKING, Final, Protocol

from skyfab._util.sizes import readable
from skyfab._util.versions import numbers
from skyfab.calls.image import Image
from skyfab.calls.results import image_option
from skyfab.env.facts import Facts, Target
from skyfab.errors import HostUnfit, SkyfabError, UsageError
from skyfab.inventory.host import Host
from skyfab.protocol.blobs import name_of
from skyfab.session.shell import ScriptFailed, Shell

if TYPE_CHECKING:
    from skyfab.env.install import Package
    from skyfab.env.lock import Lock
    from skyfab.env.wheels import Wheel

_OLDEST_UV: Final = (0, 8)
"""Older versions cannot read a pylock.toml."""
_OTHERS: Final = 10.0
"""Seconds to wait for the other hosts' targets: torch must have the same version on all of them."""
_PYTHONS: Final = "https://github.com/astral-sh/python-build-standalone"
"""Where uv downloads interpreters: a host that can reach it may do so itself."""
_LAYOUT: Final = "1"
"""Changes when environments are built differently."""


class Report(Protocol):
    """Shows the progress to the user."""

    def step(self, text: str) -> None:
        """A new step begins: ``probing``."""

    def moved(self, what: str, done: int, total: int) -> None:
        """`done` of `total` bytes have been transferred: ``pushing`` 61 of 155 MB."""


class Preparation:
    """Prepares one image's environment on the hosts of a pool, in parallel."""

    def __init__(self, image: Image, hosts: Sequence[Host], python: str) -> None:
        """`python` is this program's major.minor: functions are sent as bytecode."""
        self.image = image
        self.python = python
        self._targets: dict[str, Target] = {}
        self._absent = {host.name for host in hosts}
        self._met = threading.Condition()

    @property
    def is_empty(self) -> bool:
        """Whether any interpreter of the right version can be used."""
        return not (self.image.pip or self.image.lock or self.image.apt)

    def guess(self, host: Host) -> str:
        """The interpreter to request first: see `Bootstrap.python`. Raises UsageError for an invalid image."""
        if self.is_empty:
            return self.python
        from skyfab.env import facts_cache  # imported late: most pools do not need it

        facts = facts_cache.load(host)
        if facts is None or not facts.boot:
            return "none"
        target = Target.of(facts, self.python)
        self.meet(host, target)
        lock = self.known_lock(target)
        return "none" if lock is None else f"env/{self.digest(lock)}/{facts.boot}"

    def prepare(self, host: Host, shell: Shell, *, session: str, report: Report) -> str | None:
        """Builds the environment and starts its interpreter: see `Bootstrap.prepare`.

        Raises HostUnfit, or UsageError with the host set.
        """
        try:
            return _Steps(self, host, shell, session, report).run()
        except ScriptFailed as failed:
            raise _unfit(failed, host) from None
        except SkyfabError as error:
            error.host = error.host or host.name
            raise

    def lock(self, target: Target) -> Lock:
        """The image's lock for a target; made if there is none yet."""
        from skyfab.env.lock import make_lock

        return make_lock(self.image, target, together=self._together())

    def known_lock(self, target: Target) -> Lock | None:
        """The image's lock for a target, if there is one."""
        from skyfab.env.lock import known_lock

        return known_lock(self.image, target, together=self._together())

    def _together(self) -> list[Target]:
        return sorted(set(self._targets.values()), key=repr)

    def digest(self, lock: Lock) -> str:
        """The environment's name: a hash of everything that it is built from."""
        return name_of("\0".join((_LAYOUT, lock.digest, *sorted(self.image.apt))).encode())[:40]

    def meet(self, host: Host, target: Target | None) -> None:
        """Records a host's target; None: the host does not take part."""
        with self._met:
            self._absent.discard(host.name)
            if target is not None:
                self._targets[host.name] = target
            self._met.notify_all()

    def wait_for_all(self) -> None:
        """Waits until the targets of all hosts are known, at most `_OTHERS` seconds."""
        with self._met:
            self._met.wait_for(lambda: not self._absent, _OTHERS)


@dataclass(frozen=True, slots=True)
class _Steps:
    """The preparation of one host."""

    plan: Preparation
    host: Host
    shell: Shell
    session: str
    report: Report

    def run(self) -> str | None:
        from skyfab.env.install import enter

        plan = self.plan
        self.report.step("probing")
        facts = self._probe()
        own = self._own_python(facts)
        if plan.is_empty and own is not None:
            return self.shell.go(quote(own))
        target = Target.of(facts, plan.python)
        self.report.step("resolving")
        plan.meet(self.host, target)
        plan.wait_for_all()
        lock = plan.lock(target)
        digest = plan.digest(lock)
        answer = enter(self.shell, digest)
        if answer == "absent":
            self._install(facts, target, lock, own, digest)
            answer = enter(self.shell, digest)
        return answer

    def _probe(self) -> Facts:
        from skyfab.env import facts_cache, probe

        facts = probe.parse(self.shell.run(probe.script()))
        facts_cache.remember(self.host, facts)
        if facts.noexec:
            raise HostUnfit(
                f"cannot run programs from {facts.cache}: its disk is mounted noexec",
                hint="put the cache on another disk (cache = … in the inventory)",
            )
        return facts

    def _own_python(self, facts: Facts) -> str | None:
        """An interpreter that is installed on the host and has the right version."""
        if self.host.python.startswith("/"):
            return self.host.python
        minor = tuple(self.plan.python.split("."))
        return next((p.path for p in facts.pythons if tuple(p.version.split(".")[:2]) == minor), None)

    def _pushed(self, facts: Facts, lock: Lock) -> tuple[list[Wheel], bool]:
        """The wheels that the host cannot download by itself, and whether it can download an interpreter."""
        from skyfab.env import probe
        from skyfab.env.uv import is_public, origin

        install = self.plan.image.install
        if install == "push":
            return [*lock.wheels], False
        asked = {wheel: f"{origin(wheel.url)}/" for wheel in lock.wheels if is_public(wheel.url)}
        python = facts.pythons[0].path if facts.pythons else ""
        script = probe.script((*dict.fromkeys(asked.values()), _PYTHONS), python)
        reached = {*probe.parse(self.shell.run(script)).reachable}
        if install == "fetch":
            reached.update(asked.values())
        return [wheel for wheel in lock.wheels if asked.get(wheel) not in reached], _PYTHONS in reached

    def _install(self, facts: Facts, target: Target, lock: Lock, own: str | None, digest: str) -> None:
        from skyfab.env.install import Package, build, discard, install_apt, unpack_python
        from skyfab.env.tools import python_for

        pushed, python_there = self._pushed(facts, lock)
        text = lock.placed(lambda wheel: f"../{wheel.sha256}/{wheel.filename}" if wheel in pushed else None)
        listed = Package.of_text("pylock.toml", text)
        uv, tools = self._uv(facts, target)
        archive = None
        if own is None and not python_there:
            self.report.step(f"fetching Python {target.python}")
            archive = Package.of_file(python_for(target))
            tools = [*tools, archive]
        wheels = [Package.of_wheel(wheel) for wheel in pushed]
        packages = [listed, *tools, *wheels]
        self._provide(facts, lock, packages)
        if self.plan.image.apt:
            self.report.step("installing apt packages")
            install_apt(self.shell, self.plan.image.apt)
        self.report.step(_installing(lock, target))
        python = own or (unpack_python(self.shell, archive) if archive else target.python)
        offline = len(pushed) == len(lock.wheels) and not python_there
        make = functools.partial(
            build, self.shell, digest, session=self.session, uv=uv, python=python, lock=listed, offline=offline
        )
        try:
            make()
        except ScriptFailed as failed:
            changed = _mismatched(failed)
            if not changed:
                raise
            if wheels:
                discard(self.shell, wheels)  # one of them was damaged on the host
                self._provide(facts, lock, packages)
            make(refresh=changed)  # uv's cache may have a wheel that was replaced under the same name and version

    def _provide(self, facts: Facts, lock: Lock, packages: Sequence[Package]) -> None:
        """Uploads the packages that the host does not have."""
        from skyfab.env.install import missing

        lacking = missing(self.shell, packages)
        if lacking:
            self._push(facts, lock, lacking)

    def _uv(self, facts: Facts, target: Target) -> tuple[str, list[Package]]:
        """uv as `build` takes it, and the packages that must be uploaded for it."""
        from skyfab.env.install import Package
        from skyfab.env.tools import uv_for

        if facts.uv is not None and numbers(facts.uv.version) >= _OLDEST_UV:
            return facts.uv.path, []
        package = Package.of_file(uv_for(target), program=True)
        return package.place, [package]

    def _push(self, facts: Facts, lock: Lock, lacking: Sequence[Package]) -> None:
        from skyfab.env.install import Package, push
        from skyfab.env.wheels import fetch

        names = {package.sha256 for package in lacking}
        wanted = [wheel for wheel in lock.wheels if wheel.sha256 in names]
        files = fetch(wanted, progress=functools.partial(self.report.moved, "fetching"))
        packages = [p if p.sha256 not in files else Package.of_file(files[p.sha256], sha256=p.sha256) for p in lacking]
        total = sum(package.size for package in packages)
        if facts.free and total > facts.free:
            raise HostUnfit(
                f"the packages need {readable(total)}, but its disk has {readable(facts.free)} free", hint=_ROOM
            )
        progress = functools.partial(self.report.moved, "pushing")
        push(self.shell, packages, session=self.session, progress=progress)


_ROOM: Final = "free some space on it (skyfab gc), or put the cache on another disk (cache = … in the inventory)"


def _installing(lock: Lock, target: Target) -> str:
    """The step's name. It mentions packages that were built on this machine, and a build for GPUs on a host without
    one: that takes long, and much room.
    """
    from skyfab.env.sdists import is_built
    from skyfab.env.torch_variants import is_for_gpus

    if not (target.is_plain and is_for_gpus(wheel.package for wheel in lock.wheels)):
        built = [f"{wheel.package} {wheel.version}" for wheel in lock.wheels if is_built(wheel)]
        return f"installing (built on this machine: {', '.join(built)})" if built else "installing"
    size = sum(wheel.size or 0 for wheel in lock.wheels)
    return f"installing torch for CUDA, as no CPU build was found{f' ({readable(size)})' if size else ''}"


def _mismatched(failed: ScriptFailed) -> list[str]:
    """The packages whose wheels, according to uv, do not match the lock."""
    return re.findall(r"hash mismatch for `?([\w.-]+)", failed.output, re.IGNORECASE)


def _unfit(failed: ScriptFailed, host: Host) -> Exception:
    """Converts the output of a failed script to an error of its host."""
    from skyfab.env.uv import reason, redact

    text = redact(reason(failed.output)) or f"a script exited with {failed.status}"
    hint = None
    if any(word in text for word in ("No space left", "quota exceeded", "Disk quota")):
        hint = _ROOM
    elif _mismatched(failed):
        hint = "the file in the index has changed since it was locked; to lock it again: skyfab prepare --upgrade"
    elif any(word in text for word in ("Permission denied", "Read-only")):
        hint = "choose a writable folder (cache = … in the inventory)"
    return HostUnfit(f"cannot build its environment: {text}", host=host.name, hint=hint)


def check(image: Image, python: str) -> None:
    """Checks an image before any host is contacted. Raises UsageError."""
    if image.python.startswith("/") and (image.pip or image.lock or image.apt):
        raise UsageError(
            f"{image_option('python', image.python)} is used as it is: nothing is installed into it",
            hint="leave python out, or pip, lock and apt",
        )
    wanted = image.python if image.python[0].isdigit() else python
    if wanted.split(".")[:2] != python.split("."):
        raise UsageError(
            f"{image_option('python', image.python)}, but this program runs {python}: hosts must run the same Python"
            " minor version as this machine",
            hint=f"run this program with Python {image.python}, or use {image_option('python', python)}",
        )
