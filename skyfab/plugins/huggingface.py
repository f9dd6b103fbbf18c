"""Plugin for Hugging Face: its libraries, and a token that is only set in the environment of the workers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skyfab.plugins.accelerate import meet_on_cpus
from skyfab.plugins.base import Plugin
from skyfab.plugins.packages import with_packages, with_trainer

if TYPE_CHECKING:
    from skyfab.calls.image import Image
    from skyfab.context import InstanceInfo
    from skyfab.inventory.host import Host


@dataclass(frozen=True, repr=False)
class HuggingFace(Plugin):
    """transformers, datasets and tokenizers on every host; `token` is ``HF_TOKEN`` in the workers.

    The token is sent over the SSH connection and never written to a file. The Trainer finds rank and world size in
    torchrun's variables; with `plugins.torch` it also has the process group, and accelerate, which it needs.
    """

    network = "wanted"  # the Trainer connects ranks, a pipeline does not
    token: str | None = None

    def __repr__(self) -> str:
        return f"HuggingFace(token={'None' if self.token is None else '[secret]'})"

    def transform(self, image: Image, host: Host) -> Image:
        return with_trainer(with_packages(image, host, "transformers", "datasets", "tokenizers"), host)

    @contextmanager
    def around_process(self, info: InstanceInfo) -> Iterator[None]:
        if self.token is not None:
            os.environ["HF_TOKEN"] = self.token
        yield

    @contextmanager
    def around_call(self, info: InstanceInfo) -> Iterator[None]:
        meet_on_cpus(info)
        yield
