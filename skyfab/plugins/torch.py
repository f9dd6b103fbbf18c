"""Plugin for PyTorch: installs the right build on each host, and makes a process group before a function runs."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from skyfab import context
from skyfab.errors import UsageError
from skyfab.plugins.base import RENDEZVOUS, Elastic, Plugin
from skyfab.plugins.packages import canonical, installed, named, pinned, used_as_it_is, with_packages, with_trainer

if TYPE_CHECKING:
    from skyfab.calls.image import Image
    from skyfab.context import InstanceInfo
    from skyfab.inventory.host import Host

INDEX: Final = "https://download.pytorch.org/whl"
"""PyTorch's package indexes, one for each build."""
TIMEOUT: Final = 60.0
"""Timeout in seconds for all ranks to connect, once they have imported torch."""
_BUILD: Final = re.compile(r"auto|cpu|cu\d+|rocm[\d.]+|xpu")


@dataclass(frozen=True, kw_only=True)
class Torch(Plugin):
    """Made by `torch`, which documents the fields."""

    network = "needed"
    exclusive = RENDEZVOUS
    backend: str | None = None
    cuda: str = "auto"
    version: str = "auto"
    vision: bool | str | None = None
    audio: bool | str | None = None
    elastic: Elastic | None = None

    def __post_init__(self) -> None:
        if not _BUILD.fullmatch(self.cuda):
            raise UsageError(
                f"invalid torch(cuda={self.cuda!r})",
                hint='expected "auto", "cpu", or a build such as "cu128" or "rocm6.4"',
            )

    def transform(self, image: Image, host: Host) -> Image:
        if used_as_it_is(image, host):
            return image
        release = None if "torch" in named(image) else self.release()
        wanted = [pinned("torch", release), "numpy"]
        if self.vision:
            wanted.append(_companion("torchvision", self.vision, release))
        if self.audio:
            wanted.append(_companion("torchaudio", self.audio, release))
        return self._with_index(with_trainer(with_packages(image, host, *wanted), host))

    def release(self) -> str | None:
        """The version to install on hosts; None for any."""
        if self.version != "auto":
            return None if self.version == "latest" else self.version
        return installed("torch")

    def _with_index(self, image: Image) -> Image:
        from skyfab.calls.image import PipIndex

        scoped = {canonical(name) for index in image.pip_indexes for name in index.packages}
        packages = [name for name in ("torch", "torchvision", "torchaudio") if name not in scoped]
        if self.cuda == "auto" or "torch" in scoped:
            return image
        if self.cuda.startswith("rocm"):  # its dependencies are only in that index
            packages += ["pytorch-triton-rocm", "triton-rocm"]
        index = PipIndex(f"{INDEX}/{self.cuda}", tuple(packages))
        return replace(image, pip_indexes=(*image.pip_indexes, index))

    @contextmanager
    def around_process(self, info: InstanceInfo) -> Iterator[None]:
        if "RANK" not in os.environ or not info.head_port:
            yield  # a solo call: the first device is the current one, and there is no process group
            return
        import torch.distributed as dist

        store = self._join(info)
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            del store  # the head's is the server for the others: keep it until here

    def run_elastic_agent(self, info: InstanceInfo, work: tuple[Any, ...]) -> list[tuple[int, Any]]:
        from skyfab.plugins.elastic import run_elastic_agent

        assert self.elastic is not None
        return run_elastic_agent(self.elastic, _open_store, info, work)

    def _join(self, info: InstanceInfo) -> Any:
        """Makes the process group; returns the store, which must live as long as that does."""
        import torch
        import torch.distributed as dist

        device, able = _own_device(info)
        store = _open_store(info)
        agreed = _meet(store, info, "nccl" if able else "gloo")
        backend = self.backend or ("nccl" if agreed == {"nccl"} else "gloo")
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # env:// connects to the existing store
        bound = torch.device("cuda", device) if device is not None and "nccl" in backend else None
        dist.init_process_group(backend, init_method="env://", device_id=bound)
        return store


def torch(
    backend: str | None = None,
    cuda: str = "auto",
    version: str = "auto",
    vision: bool | str | None = None,
    audio: bool | str | None = None,
    elastic: tuple[int, int] | None = None,
    max_restarts: int = 3,
) -> Torch:
    """PyTorch on every host, and one process group over all ranks of ``@``.

    `backend` defaults to NCCL if every rank has its own GPU, else to gloo. `cuda` is the build: ``"auto"`` depends on
    each host's driver, ``"cpu"`` or ``"cu128"`` are explicit. `version` defaults to the one on this machine;
    `vision` and `audio` add torchvision and torchaudio, with ``True`` in the version that matches torch's.

    With ``elastic=(2, 4)`` ``@`` runs under torch.distributed.elastic, on at most four hosts and at least two. Lost
    hosts are excluded, and after a failure the ranks are restarted, up to `max_restarts` times. With each restart the
    function starts again on all ranks, ``instance_info().attempt`` is incremented, and it should load its checkpoint.
    """
    return Torch(
        backend=backend,
        cuda=cuda,
        version=version,
        vision=vision,
        audio=audio,
        elastic=None if elastic is None else _elastic(elastic, max_restarts),
    )


def _elastic(hosts: tuple[int, int], max_restarts: int) -> Elastic:
    min_hosts, max_hosts = hosts
    if not 1 <= min_hosts <= max_hosts or max_restarts < 0:
        raise UsageError(
            f"invalid torch(elastic=({min_hosts}, {max_hosts}), max_restarts={max_restarts})",
            hint="expected the minimum and maximum number of hosts, 1 or more, and the number of restarts",
        )
    return Elastic(min_hosts, max_hosts, max_restarts)


# ---- the process group


def _own_device(info: InstanceInfo) -> tuple[int | None, bool]:
    """Selects this rank's GPU. Returns its number, or None, and whether no other rank uses it."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return None, False
    device = info.local_rank % count
    torch.cuda.set_device(device)
    return device, info.local_world_size <= count


def _open_store(info: InstanceInfo) -> Any:
    """The TCPStore for the rendezvous. The head already listens, or starts to; the others retry until it does."""
    import torch
    from torch.distributed import TCPStore

    options: dict[str, Any] = {"timeout": timedelta(seconds=TIMEOUT), "wait_for_workers": False}
    if info.is_head:
        options["is_master"] = True
        listener = _listener(info)
        if listener >= 0:  # before torch 2.8, the libuv server accepts a socket but does not listen
            options |= {"master_listen_fd": listener, "use_libuv": torch.__version__ >= (2, 8)}
    return TCPStore(info.head_addr, info.head_port, info.world_size, **options)


def _listener(info: InstanceInfo) -> int:
    """A socket that listens only at the head's address: torch's own would listen at every address of the host.

    Returns -1 if the address does not belong to this host.
    """
    listener = context.take_listener()
    if listener >= 0:
        return listener
    family = socket.AF_INET6 if ":" in info.head_addr else socket.AF_INET
    try:
        return socket.create_server((info.head_addr, info.head_port), family=family, backlog=2048).detach()
    except OSError:
        return -1


def _meet(store: Any, info: InstanceInfo, word: str) -> set[str]:
    """Waits until every rank has stored its `word`; returns all words. Raises TimeoutError, naming the missing ranks.

    Not left to torch, whose timeout for the rendezvous also applies to every later collective.
    """
    from torch.distributed import DistStoreError

    keys = [f"skyfab/rank{rank}" for rank in range(info.world_size)]
    store.set(keys[info.rank], word)
    try:
        store.wait(keys, timedelta(seconds=TIMEOUT))
    except DistStoreError:
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        raise TimeoutError(
            f"rank {', '.join(missing) or '?'} of {info.world_size} did not connect to the rendezvous"
            f" at {info.head_addr}:{info.head_port} within {TIMEOUT:.0f} s"
        ) from None
    return {store.get(key).decode() for key in keys}


def _companion(package: str, version: bool | str, release: str | None) -> str:
    """The requirement for torchvision or torchaudio. Their own metadata requires the exact version of torch."""
    if isinstance(version, str):
        return pinned(package, None if version in ("auto", "latest") else version)
    numbers = re.fullmatch(r"(?:==)?2\.(\d+)(\..*)?", release or "")
    if numbers is None:
        return package
    minor = int(numbers[1])
    if package == "torchvision":
        return f"torchvision==0.{minor + 15}.*"
    return f"torchaudio==2.{minor}.*" if minor <= _LAST_PAIR else package


_LAST_PAIR: Final = 11
"""The last minor version of torch with its own torchaudio. torchaudio 2.11 also works with later ones."""
