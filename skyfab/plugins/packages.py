"""Helpers for plugins that add packages to an image, unless the user chose a fixed interpreter or lock."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyfab.calls.image import Image
    from skyfab.inventory.host import Host


def with_packages(image: Image, host: Host, *requirements: str) -> Image:
    """The image plus these packages, except those that it names already. Unchanged if nothing is to be installed."""
    if used_as_it_is(image, host):
        return image
    known = named(image)
    more = [text for text in requirements if not known & {_name(text)}]
    return replace(image, pip=(*image.pip, *more)) if more else image


def with_trainer(image: Image, host: Host) -> Image:
    """Adds accelerate if the image has both transformers and torch: the Trainer needs it.

    Both plugins call this, since either may come second. Without that check, accelerate would pull in torch.
    """
    return with_packages(image, host, "accelerate") if {"torch", "transformers"} <= named(image) else image


def used_as_it_is(image: Image, host: Host) -> bool:
    """The user has chosen the interpreter or the packages: nothing is to be installed."""
    if image.python.startswith("/") or image.is_exact:
        return True
    chosen = host.is_here or (image.python == "auto" and host.python.startswith("/"))
    return chosen and not image.pip and not image.apt


def named(image: Image) -> set[str]:
    """The canonical names of the packages that an image requires."""
    return {_name(text) for text in image.pip}


def pinned(package: str, version: str | None) -> str:
    """A requirement: ``"2.9.1"`` is that version, ``">=2.9"`` a range."""
    return package if version is None else f"{package}{'' if version[:1] in '<>=!~' else '=='}{version}"


def installed(package: str) -> str | None:
    """The version of a package on this machine, without the build; None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return None


def pinned_as_here(*packages: str) -> list[str]:
    """Requirements for those of the packages that this machine has, in the same versions."""
    return [pinned(name, here) for name in packages if (here := installed(name)) is not None]


def _name(requirement: str) -> str:
    found = re.match(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)", requirement)
    return canonical(found[1]) if found else ""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
