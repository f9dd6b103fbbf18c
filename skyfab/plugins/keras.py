"""Plugin for Keras: installs it, and selects its backend before it is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from skyfab.errors import UsageError
from skyfab.plugins.base import Plugin
from skyfab.plugins.packages import with_packages
from skyfab.plugins.torch import Torch

if TYPE_CHECKING:
    from skyfab.calls.image import Image
    from skyfab.context import InstanceInfo
    from skyfab.inventory.host import Host

Backend = Literal["torch", "jax", "tensorflow", "numpy"]


@dataclass(frozen=True)
class Keras(Plugin):
    """Keras on every host, with `backend`, which is installed too.

    For training over several ranks, add the backend's own plugin: ``[plugins.jax(), plugins.keras(backend="jax")]``.
    """

    exclusive = "the choice of Keras' backend"
    backend: Backend = "torch"

    def __post_init__(self) -> None:
        if self.backend not in get_args(Backend):
            raise UsageError(f"keras(backend={self.backend!r})", hint=f"one of {', '.join(get_args(Backend))}")

    def transform(self, image: Image, host: Host) -> Image:
        image = with_packages(image, host, "keras")
        if self.backend == "torch":  # the same version as `plugins.torch` installs
            return Torch().transform(image, host)
        return with_packages(image, host, self.backend)

    @contextmanager
    def around_process(self, info: InstanceInfo) -> Iterator[None]:
        os.environ["KERAS_BACKEND"] = self.backend
        yield
