"""Plugin for Dask: its packages, in the versions that this machine has, for `Compute.dask`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from skyfab.plugins.base import Plugin
from skyfab.plugins.packages import installed, pinned, pinned_as_here, with_packages

if TYPE_CHECKING:
    from skyfab.calls.image import Image
    from skyfab.inventory.host import Host

_SHARED: Final = ("numpy", "pandas", "pyarrow", "lz4", "msgpack", "toolz", "tornado")
"""Packages whose objects this program and hosts exchange, or that Dask uses to exchange them."""


@dataclass(frozen=True)
class Dask(Plugin):
    """Dask on every host, for ``compute.dask()``: ``distributed``, and bokeh for its dashboard.

    `version` defaults to the one on this machine. Hosts also get numpy, pandas and pyarrow if this machine has them, in
    the same versions.
    """

    version: str = "auto"

    def transform(self, image: Image, host: Host) -> Image:
        release = installed("distributed") if self.version == "auto" else self.version
        return with_packages(
            image,
            host,
            pinned("distributed", None if release == "latest" else release),
            "bokeh",  # the dashboard
            *pinned_as_here(*_SHARED),
        )
