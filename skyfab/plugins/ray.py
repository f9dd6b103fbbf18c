"""Plugin for Ray: installs it on every host, and connects functions to the Ray that `compute.ray()` has started."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skyfab.plugins.base import Plugin
from skyfab.plugins.packages import installed, pinned, with_packages

if TYPE_CHECKING:
    from skyfab.calls.image import Image
    from skyfab.context import InstanceInfo
    from skyfab.inventory.host import Host


@dataclass(frozen=True, kw_only=True)
class Ray(Plugin):
    """Made by `ray`, which documents its first fields."""

    extra: str | None = None
    version: str = "auto"
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables that connect a function to the running Ray, including its token. Empty while none runs."""
    head: str = ""
    """The host of the running Ray's head."""

    def transform(self, image: Image, host: Host) -> Image:
        package = f"ray[{self.extra}]" if self.extra else "ray"
        release = installed("ray") if self.version == "auto" else self.version
        return with_packages(image, host, pinned(package, None if release == "latest" else release))

    @contextmanager
    def around_call(self, info: InstanceInfo) -> Iterator[None]:
        before = {name: os.environ[name] for name in self.variables.keys() & os.environ}
        os.environ.update(self.variables)
        try:
            yield
        finally:
            ray = sys.modules.get("ray")
            if self.variables and ray is not None:
                ray.shutdown()  # each call is its own driver: the next one may call ray.init() too
                with suppress(KeyError, AttributeError):  # the next Ray of this pool has another token
                    sys.modules["ray._raylet"].AuthenticationTokenLoader.instance().reset_cache()
            for name in self.variables:
                os.environ.pop(name, None)
            os.environ.update(before)


def ray(extra: str | None = None, *, version: str = "auto") -> Ray:
    """Ray on every host, for `compute.ray()`.

    `extra` is as in ``ray[default]``, which adds the dashboard; without it, only Ray. `version` is by default the one
    on this machine; if it has none, and for "latest", the newest.
    """
    return Ray(extra=extra, version=version)
