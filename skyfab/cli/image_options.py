"""The options that describe an environment, for `skyfab prepare` and `skyfab run`, and the image for them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from skyfab.cli.command import Option
from skyfab.errors import UsageError

if TYPE_CHECKING:
    from skyfab.calls.image import Image, PipIndex

Index = Annotated[Sequence[str], Option("an index for these packages only; repeatable", "URL=PACKAGES")]


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """The values of these options."""

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
