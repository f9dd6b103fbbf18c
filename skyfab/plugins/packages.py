"""Packages: what plugins of frameworks add to an image, and when they leave it alone."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyfab.calls.image import Image
    from skyfab.inventory.host import Host


def with_packages(image: Image, host: Host, *requirements: str) -> Image:
    """The image with these packages too, but for those that it names already; as it was where nothing is installed."""
    if used_as_it_is(image, host):
        return image
    known = named(image)
    more = [text for text in requirements if not known & {_name(text)}]
    return replace(image, pip=(*image.pip, *more)) if more else image


def with_trainer(image: Image, host: Host) -> Image:
    """With accelerate too, where both transformers and torch are asked for: the Trainer needs it.

    Both plugins call this, since either may come second. Without torch it would bring torch along.
    """
    return with_packages(image, host, "accelerate") if {"torch", "transformers"} <= named(image) else image


def used_as_it_is(image: Image, host: Host) -> bool:
    """Somebody has chosen the interpreter or the packages: those are used, and nothing is installed."""
    if image.python.startswith("/") or image.lock:
        return True
    chosen = host.transport == "local" or (image.python == "auto" and host.python.startswith("/"))
    return chosen and not image.pip and not image.apt


def named(image: Image) -> set[str]:
    """The packages that an image asks for."""
    return {_name(text) for text in image.pip}


def pinned(package: str, version: str | None) -> str:
    """``"2.9.1"`` is that version, ``">=2.9"`` a range."""
    return package if version is None else f"{package}{'' if version[:1] in '<>=!~' else '=='}{version}"


def _name(requirement: str) -> str:
    found = re.match(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)", requirement)
    return canonical(found[1]) if found else ""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
