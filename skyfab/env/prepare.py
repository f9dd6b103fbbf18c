"""Prepares an image's environment on each host of a pool: probe, lock, upload, install, start the interpreter.

A host is first asked to start the environment that it should already have, according to its cached facts. Only if that
does not exist, it is prepared.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from shlex import quote
from typing import TYPE_CHECKING, Final

from skyfab.calls.image import Image
from skyfab.env.facts import Facts, Target
from skyfab.env.share import Deliver, Sharing
from skyfab.errors import HostUnfit, SkyfabError, UsageError
from skyfab.inventory.host import Host
from skyfab.protocol.blobs import name_of
from skyfab.session.shell import ScriptFailed, Shell

if TYPE_CHECKING:
    from skyfab.env.install import Report
    from skyfab.env.lock import Lock

_OTHERS: Final = 10.0
"""Seconds to wait for the other hosts' targets: torch must have the same version on all of them."""
_LAYOUT: Final = "1"
"""Changes when environments are built differently."""


class Preparation:
    """Prepares one image's environment on the hosts of a pool, in parallel."""

    def __init__(self, image: Image, hosts: Sequence[Host], python: str, deliver: Deliver | None = None) -> None:
        """`python` is this program's major.minor: functions are sent as bytecode. See `Sharing` for `deliver`."""
        self.image = image
        self.python = python
        self._targets: dict[str, Target] = {}
        self._absent = {host.name for host in hosts}
        self._names = frozenset(self._absent)
        self._unread = list(hosts)
        """Those whose cached facts have not been read."""
        self._met = threading.Condition()
        self._sharing = Sharing(hosts, deliver, _OTHERS)

    @property
    def is_empty(self) -> bool:
        """Whether any interpreter of the right version can be used."""
        return not (self.image.pip or self.image.lock or self.image.apt)

    def guess(self, host: Host) -> str:
        """The interpreter to request first: see `Bootstrap.python`. Raises UsageError for an invalid image."""
        if self.is_empty:
            return self.python
        from skyfab.env import facts_cache  # imported late, as others below: most pools do not need them

        facts = facts_cache.load(host)
        if facts is None or not facts.boot:
            return "none"
        target = Target.of(facts, self.python)
        self.meet(host, target)
        is_complete = self._recall()
        lock = self.known_lock(target)
        if lock is None or (lock.torch and not is_complete):  # torch must have the same version on all hosts
            return "none"
        return f"env/{self.digest(lock, self.python_of(host, facts))}/{facts.boot}"

    def prepare(self, host: Host, shell: Shell, *, session: str, report: Report) -> str | None:
        """Builds the environment and starts its interpreter: see `Bootstrap.prepare`.

        Raises HostUnfit, or UsageError with the host set.
        """
        from skyfab.env.install import unfit

        try:
            return self._prepare(host, shell, session, report)
        except ScriptFailed as failed:
            raise unfit(failed, host.name) from None
        except SkyfabError as error:
            error.host = error.host or host.name
            if host.inside and error.hint:
                error.hint = error.hint.replace("on the host", f"in {host.inside}")
            raise
        finally:
            self._sharing.leave(host)

    def _prepare(self, host: Host, shell: Shell, session: str, report: Report) -> str | None:
        from skyfab.env import facts_cache
        from skyfab.env.install import Installation, enter, install_apt
        from skyfab.env.lock import make_lock

        report.step("probing")
        facts = facts_cache.probe(host, shell)
        if facts.noexec:
            raise HostUnfit(
                f"cannot run programs from {facts.cache}: its disk is mounted noexec",
                hint="put the cache on another disk (cache = … in the inventory)",
            )
        python = self.python_of(host, facts)
        if self.is_empty and python is not None:
            return shell.go(quote(python))
        target = Target.of(facts, self.python)
        report.step("resolving")
        self.meet(host, target)
        with self._met:
            self._met.wait_for(lambda: not self._absent, _OTHERS)
        lock = make_lock(self.image, target, together=self._together())
        digest = self.digest(lock, python)
        if self.image.apt:  # each machine has its own, and hosts may share the folder of the environments
            report.step("installing apt packages")
            install_apt(shell, self.image.apt)
        answer = enter(shell, digest)
        if answer == "absent":
            Installation(
                shell=shell,
                session=session,
                report=report,
                image=self.image,
                facts=facts,
                target=target,
                lock=lock,
                python=python,
                share=lambda lacking: self._sharing.share(host, lacking, report, shell.check),
            ).build(digest)
            answer = enter(shell, digest)
        return answer

    def python_of(self, host: Host, facts: Facts) -> str | None:
        """An interpreter that is installed on the host and has the right version."""
        if host.python.startswith("/"):
            return host.python
        minor = tuple(self.python.split("."))
        return next((p.path for p in facts.pythons if tuple(p.version.split(".")[:2]) == minor), None)

    def known_lock(self, target: Target) -> Lock | None:
        """The image's lock for a target, if there is one."""
        from skyfab.env.lock import known_lock

        return known_lock(self.image, target, together=self._together())

    def _recall(self) -> bool:
        """Uses the cached facts of hosts that have not been met. Returns whether the targets of all hosts are known."""
        from skyfab.env import facts_cache

        with self._met:
            while self._unread:
                host = self._unread.pop()
                facts = facts_cache.load(host)
                if facts is not None:
                    self._targets.setdefault(host.name, Target.of(facts, self.python))
            return self._targets.keys() >= self._names

    def _together(self) -> list[Target]:
        return sorted(set(self._targets.values()), key=repr)

    def digest(self, lock: Lock, python: str | None) -> str:
        """The environment's name: a hash of everything that it is built from.

        `python` is the path of the host's own interpreter: hosts that share a cache may have it at different places.
        """
        own = [python] if python else []
        return name_of("\0".join((_LAYOUT, lock.digest, *sorted(self.image.apt), *own)).encode())[:40]

    def meet(self, host: Host, target: Target | None) -> None:
        """Records a host's target; None: the host does not take part, or no more."""
        if target is None:
            self._sharing.leave(host)
        with self._met:
            self._absent.discard(host.name)
            if target is not None:
                self._targets[host.name] = target
            self._met.notify_all()


def check(image: Image, python: str) -> None:
    """Checks an image before any host is contacted. Raises UsageError."""
    if image.python.startswith("/") and (image.pip or image.lock or image.apt):
        raise UsageError(
            f"python={image.python!r} is used unchanged: nothing is installed into it",
            hint="omit python, or omit pip, lock and apt",
        )
    if image.lock and not (image.is_exact or image.pip):
        raise UsageError(
            f"lock={image.lock!r} only fixes the versions of packages, and no packages are named",
            hint="name them with pip=…, or use Image.of_project()",
        )
    wanted = image.python if image.python[0].isdigit() else python
    if wanted.split(".")[:2] != python.split("."):
        raise UsageError(
            f"python={image.python!r}, but this program runs {python}: hosts must run the same Python"
            " minor version as this machine",
            hint=f"run this program with Python {image.python}, or use python={python!r}",
        )
