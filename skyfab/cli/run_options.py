"""The options that several commands share: packages, the hosts and the environment of a script, GPUs for a run."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from skyfab._util.sizes import counted
from skyfab.cli.command import InventoryFile, NamedHosts, Nodes, Option, Where, Workdir
from skyfab.errors import UsageError

if TYPE_CHECKING:
    from skyfab.calls.call import Call
    from skyfab.calls.image import Image, PipIndex
    from skyfab.pool.compute import Compute

Index = Annotated[Sequence[str], Option("an index for these packages only; repeatable", "URL=PACKAGES")]


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """The options that describe an environment, and the image for them."""

    pip: Annotated[
        Sequence[str], Option("packages instead of the project's: numpy,torch>=2.6; repeatable", "PACKAGES")
    ] = ()
    with_: Annotated[
        Sequence[str], Option("packages to add to those of the project or script; repeatable", "PACKAGES")
    ] = ()
    index: Index = ()
    requirements: Annotated[str | None, Option("install the packages of a requirements file", "FILE")] = None
    apt: Annotated[Sequence[str], Option("Debian packages to install; repeatable", "PACKAGES")] = ()
    install: Annotated[
        str, Option("push (send packages from this machine), fetch (hosts download them), or auto", "HOW")
    ] = "auto"
    python: Annotated[
        str,
        Option(
            "a version, the path of an interpreter on the hosts to use unchanged, or auto (this program's version)",
            "VERSION|PATH",
        ),
    ] = "auto"
    lock: str | None = None
    """Not an option of every command: `skyfab prepare --lock` writes the file."""

    @property
    def name_packages(self) -> bool:
        """Whether they say what is to be installed, or that nothing is."""
        return bool(self.pip or self.requirements or self.apt or self.lock or self.python != "auto")

    def added_to(self, image: Image) -> Image:
        """The image with the packages of ``--with``. Raises UsageError."""
        more = [one for text in self.with_ for one in _requirements(text)]
        if more and image.is_exact:
            raise UsageError(
                f"--with={more[0]} adds nothing to {image.lock}, which is used unchanged",
                hint=f"add it to the lock: skyfab prepare --pip=… --lock={image.lock}",
            )
        return replace(image, pip=(*image.pip, *more))

    def image(self) -> Image:
        """The image without the packages of ``--with``. Raises UsageError."""
        from skyfab.calls.image import Image
        from skyfab.calls.manifest import listed

        wanted = [one for text in self.pip for one in _requirements(text)]
        if self.requirements is not None:
            wanted += listed(Path(self.requirements).expanduser())
        return Image(
            python=self.python,
            pip=tuple(wanted),
            pip_indexes=tuple(map(_index, self.index)),
            apt=tuple(name for text in self.apt for name in re.split(r"[,\s]+", text.strip()) if name),
            install=self.install,  # type: ignore[arg-type]  # the image checks it
            lock=self.lock,
        )


def _requirements(text: str) -> list[str]:
    """Splits at commas that are followed by a new name.

    >>> _requirements("numpy>=1,<2,uvicorn[standard,x], torch")
    ['numpy>=1,<2', 'uvicorn[standard,x]', 'torch']
    """
    parts = re.split(r",(?![^\[]*\])(?=\s*[A-Za-z0-9])", text)
    return [part for part in (part.strip(", \t\n") for part in parts) if part]


def _index(text: str) -> PipIndex:
    from skyfab.calls.image import PipIndex

    url, _, packages = text.rpartition("=")
    names = tuple(name for name in re.split(r"[,\s]+", packages.strip()) if name)
    if "://" not in url or not names:
        raise UsageError(f"invalid --index={text}", hint="--index=https://download.example/simple=torch,torchvision")
    return PipIndex(url, names)


@dataclass(frozen=True, kw_only=True)
class ScriptOptions(ImageOptions):
    """The options that say where a script runs and in which environment."""

    hosts: NamedHosts = None
    inventory: InventoryFile = None
    container: Annotated[str, Option("run in this container or apptainer image of each host", "NAME|IMAGE")] = ""
    where: Where = None
    nodes: Nodes = None
    workdir: Workdir = "auto"
    lock: Annotated[str | None, Option("install the packages of this pylock.toml", "FILE")] = None
    env: Annotated[
        Sequence[str], Option("set a variable; without a value, copy it from this shell; repeatable", "NAME[=VALUE]")
    ] = ()
    env_file: Annotated[
        Sequence[str], Option("read variables from a file with lines NAME=VALUE; repeatable", "FILE")
    ] = ()
    no_project: Annotated[bool, Option("install no packages of the script or project ([tool.skyfab] applies)")] = False


@dataclass(frozen=True, kw_only=True)
class GpuOptions:
    """The options of a run on GPUs that nobody else uses."""

    gpus: Annotated[int | None, Option("take N GPUs that nobody else uses, on each host", "N")] = None
    when_free: Annotated[bool, Option("wait until the GPUs are free, first come first served")] = False
    priority: Annotated[
        str,
        Option(
            "low: wait for GPUs, and give way to runs of normal priority: the program gets SIGTERM, has 30 s for a "
            "checkpoint, and waits again",
            "P",
        ),
    ] = "normal"

    @property
    def claims(self) -> bool:
        """Whether the run takes GPUs for itself. Raises UsageError."""
        if self.priority not in ("normal", "low"):
            raise UsageError(f"invalid --priority={self.priority}", hint="expected normal or low")
        if self.priority == "low" and not (self.when_free or self.gpus):
            raise UsageError("--priority needs --when-free or --gpus", hint="to wait for all GPUs: --when-free")
        return self.when_free or self.gpus is not None

    def added_to(self, options: ScriptOptions) -> ScriptOptions:
        """With the variable that keeps its ranks from noting all GPUs as in use."""
        from skyfab.host.gpu_locks import QUEUED

        return replace(options, env=(*options.env, f"{QUEUED}=claimed")) if self.claims else options

    def supervised(
        self, call: Call[Any], compute: Compute, name: str, server: dict[str, Any] | None = None
    ) -> Call[Any]:
        """A call that runs the same program, but first takes GPUs, or restarts it as a `server`.

        Raises UsageError if a host has too few GPUs.
        """
        from skyfab.calls.call import as_function
        from skyfab.host.command import execute
        from skyfab.host.supervise import supervise

        few = {node.name: len(node.gpus) for node in compute.hosts if len(node.gpus) < (self.gpus or 1)}
        if self.claims and few:
            has = ", ".join(f"{host} has {counted(count, 'GPU')}" for host, count in few.items())
            typed = "--when-free" if self.gpus is None else f"--gpus={self.gpus}"
            raise UsageError(f"{typed}: {has}", hint="choose other hosts, or fewer GPUs")
        is_low = self.priority == "low"
        is_command = call.function.fn is execute
        settings = {
            "gpus": {"count": self.gpus, "wait": self.when_free or is_low, "low": is_low} if self.claims else None,
            "server": server,
            "run": name,
            "script": None if is_command else json.dumps(call.args),
            "secret": secrets.token_hex(32),
        }
        supervised = as_function(supervise)
        supervised.label = call.function.label
        return supervised(*(call.args if is_command else ([], None)), settings)
