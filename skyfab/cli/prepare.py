"""`skyfab prepare`: builds an environment on hosts in advance, and optionally writes its lock file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

from skyfab.cli.command import InventoryFile, Json, NamedHosts, Option, command
from skyfab.errors import UsageError

if TYPE_CHECKING:
    from skyfab.calls.image import Image, PipIndex


@command
def prepare(
    hosts: NamedHosts = None,
    inventory: InventoryFile = None,
    pip: Annotated[
        Sequence[str], Option("packages, as pip would take them: numpy,torch>=2.6; may be given again", "PACKAGES")
    ] = (),
    index: Annotated[
        Sequence[str], Option("an index for those packages and no others; may be given again", "URL=PACKAGES")
    ] = (),
    requirements: Annotated[str | None, Option("a file with a requirement in each line", "FILE")] = None,
    apt: Annotated[Sequence[str], Option("Debian packages; may be given again", "PACKAGES")] = (),
    install: Annotated[
        str, Option("push (everything comes from this machine), fetch (from the indexes), or auto", "HOW")
    ] = "auto",
    upgrade: Annotated[bool, Option("look for newer versions of what was resolved before")] = False,
    lock: Annotated[str | None, Option("write the versions to this pylock.toml, for Image(lock=…)", "FILE")] = None,
    json_: Json = False,
) -> None:
    """Build an environment ahead, on all hosts at once.

    It is the one that a program finds there whose Image(pip=…, pip_indexes=…, apt=…) says the same.

        skyfab prepare --pip=numpy,torch
        skyfab prepare --hosts=gpu --requirements=requirements.txt --lock=pylock.toml
        skyfab prepare --pip=torch --index=https://download.pytorch.org/whl/cu126=torch
    """
    from skyfab.cli.environment import build, look_for_newer, write_lock
    from skyfab.cli.selected import selected

    image = image_of(pip, index, requirements, apt, install)
    if lock is not None and not image.pip:
        raise UsageError("--lock writes down packages, and there are none", hint="name some: --pip=numpy")
    found, chosen = selected(hosts, inventory, quiet=json_)
    if upgrade:
        look_for_newer(image, chosen, found)
    build(image, chosen, found, as_json=json_)
    if lock is not None:
        write_lock(Path(lock), image, chosen, quiet=json_)


_INSTALL: Final[dict[str, Literal["auto", "push", "fetch"]]] = {"auto": "auto", "push": "push", "fetch": "fetch"}


def image_of(
    pip: Sequence[str], index: Sequence[str], requirements: str | None, apt: Sequence[str], install: str
) -> Image:
    """The image for the options. Raises UsageError."""
    from skyfab.calls.image import Image

    wanted = [one for text in pip for one in _requirements(text)]
    if requirements is not None:
        wanted += _listed(Path(requirements))
    if install not in _INSTALL:
        raise UsageError(f"--install={install}", hint="auto, push or fetch")
    return Image(
        pip=tuple(wanted),
        pip_indexes=tuple(map(_index, index)),
        apt=tuple(name for text in apt for name in re.split(r"[,\s]+", text.strip()) if name),
        excludes=("*",),  # nothing of the caller's project is needed
        install=_INSTALL[install],
    )


def _requirements(text: str) -> list[str]:
    """Splits at commas that are followed by a new name.

    >>> _requirements("numpy>=1,<2,uvicorn[standard,x], torch")
    ['numpy>=1,<2', 'uvicorn[standard,x]', 'torch']
    """
    parts = re.split(r",(?![^\[]*\])(?=\s*[A-Za-z0-9])", text)
    return [part for part in (part.strip(", \t\n") for part in parts) if part]


def _listed(path: Path) -> list[str]:
    """The requirements in a file. Raises UsageError if it cannot be read or has options."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in text.replace("\\\n", " ").splitlines()]
    for line in lines:
        if line.startswith("-"):
            raise UsageError(f"{path}: it may have requirements only, not {line!r:.80}", hint="--index=URL=packages")
    return [line for line in lines if line]


def _index(text: str) -> PipIndex:
    from skyfab.calls.image import PipIndex

    url, _, packages = text.rpartition("=")
    names = tuple(name for name in re.split(r"[,\s]+", packages.strip()) if name)
    if "://" not in url or not names:
        raise UsageError(f"--index={text}", hint="--index=https://download.example/simple=torch,torchvision")
    return PipIndex(url, names)
