"""The image (interpreter and packages) of each host of a pool, after the plugins' changes, and its preparation."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from skyfab.calls import nesting
from skyfab.calls.image import Image
from skyfab.env.prepare import Preparation, check
from skyfab.env.share import Deliver
from skyfab.errors import UsageError
from skyfab.inventory.host import Host, checked
from skyfab.plugins.base import Plugin, check_together
from skyfab.session.ask import Prepare
from skyfab.session.bootstrap import local_python
from skyfab.session.shell import Shell
from skyfab.ui.events import Events, HostState, Moved, Notice

if TYPE_CHECKING:
    from skyfab.env.install import Report

_LOG: Final = logging.getLogger("skyfab")


class HostImages:
    """One image per host. Hosts with equal images share one preparation."""

    def __init__(
        self, hosts: Sequence[Host], image: Image, plugins: Sequence[Plugin], env: Mapping[str, str] | None = None
    ) -> None:
        """`hosts` are those that are known already; `env` are variables of the pool. Raises UsageError."""
        if not isinstance(image, Image):
            raise UsageError(f"image={image!r} is not an Image", hint='for example, image=sky.Image(pip=["torch"])')
        check_together(plugins)
        self.plugins = tuple(plugins)
        self._image = image
        self._env = checked("env", env or {}, "env")
        self._images: dict[str, Image] = {}
        self._preparations: dict[str, Preparation] = {}
        self.deliver: Deliver | None = None
        """Has hosts pass packages on to each other."""
        self.add(hosts)

    def add(self, hosts: Sequence[Host]) -> None:
        """Finds the images of hosts that may be used. Raises UsageError for an invalid one."""
        for host in hosts:
            if host.name in self._images:
                continue
            wanted = self._image
            for plugin in self.plugins:
                wanted = plugin.transform(wanted, host)
            check(wanted, local_python())
            self._images[host.name] = next((known for known in self._images.values() if known == wanted), wanted)

    def image_of(self, host: Host) -> Image:
        return self._images[host.name]

    def setup(self, host: Host) -> str:
        """The shell lines that run on a host before Python: its own, then its image's."""
        return "\n".join(filter(None, (host.setup, self.image_of(host).setup)))

    def variables(self, host: Host) -> dict[str, str]:
        """The environment variables of a host's workers."""
        return {**host.env, **self.image_of(host).env, **self._env, **nesting.variables()}

    def begin(self, hosts: Sequence[Host]) -> None:
        """Starts new preparations, before these hosts are connected to."""
        for host in hosts:
            image = self._images[host.name]
            others = [other for other in hosts if self._images[other.name] is image]
            if others[0] is host:
                preparation = Preparation(image, others, local_python(), self.deliver)
                self._preparations.update({other.name: preparation for other in others})

    def interpreter(self, host: Host, session: str, report: Report) -> tuple[str, Callable[[Shell], str | None] | None]:
        """The interpreter to ask a host for, and a function that prepares it if it is missing: see `Bootstrap`."""
        image, preparation = self._images[host.name], self._preparations[host.name]
        named = image.python if image.python != "auto" else host.python
        own = preparation.is_empty
        if image.python.startswith("/") or (own and named not in ("auto", local_python())):
            return named, None
        if own and host.is_here:
            return sys.executable, None
        prepare = functools.partial(preparation.prepare, host, session=session, report=report)
        if image.apt:  # an environment does not show whether its machine has the Debian packages
            return "none", prepare
        return preparation.guess(host), prepare

    def settled(self, host: Host) -> None:
        """A host is open, or failed to connect: the preparation of others must not wait for it."""
        self._preparations[host.name].meet(host, None)


class Progress:
    """Emits events about the progress of a host's preparation."""

    def __init__(self, events: Events, host: str) -> None:
        self._events = events
        self._host = host

    def step(self, text: str) -> None:
        _LOG.debug("%s: %s", self._host, text)
        self._events.emit(HostState(host=self._host, state="preparing", detail=text))

    def moved(self, what: str, done: int, total: int) -> None:
        self._events.emit(Moved(host=self._host, what=what, done=done, total=total))

    def note(self, text: str) -> None:
        self._events.emit(Notice(host=self._host, text=text))


def install_python(events: Events) -> Prepare:
    """For `Asker`: sends an interpreter of this program's version to a host that has none."""

    def prepare(host: Host, session: str) -> Callable[[Shell], str | None]:
        preparation = Preparation(Image(), [host], local_python())
        return functools.partial(preparation.prepare, host, session=session, report=Progress(events, host.name))

    return prepare
