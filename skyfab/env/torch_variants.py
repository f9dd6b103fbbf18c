"""Checks whether the torchvision and torchaudio of a lock were built for the same devices as its torch.

Their versions alone do not show it: torchvision 0.28.0 of the default index requires torch 2.13.0, and uv accepts
2.13.0+cpu for that. That torchvision loads CUDA's libraries when it is imported, and fails.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Final

from skyfab._util.versions import numbers

COMPANIONS: Final = frozenset({"torchvision", "torchaudio"})
DRIVERS: Final = {13: (580,), 12: (525, 60, 13), 11: (450, 80, 2)}
"""CUDA's major version → the oldest driver that supports it (as in uv's own table)."""


@dataclass(frozen=True, slots=True)
class Build:
    """A package of a lock."""

    package: str
    version: str
    source: str
    """The index or folder that it comes from."""

    def __str__(self) -> str:
        return f"{self.package} {self.version}"


def of_lock(text: str) -> dict[str, Build]:
    """torch and its companions in a pylock.toml as uv writes it."""
    found = {}
    for part in text.split("[[packages]]")[1:]:
        name, version = _value("name", part), _value("version", part)
        if name == "torch" or name in COMPANIONS:
            source = _value("index", part) or _value("url", part).rpartition("/")[0]
            found[name] = Build(name, version, source)
    return found


def _value(key: str, part: str) -> str:
    found = re.search(rf'(?:^|[{{ ]){key} = "([^"]*)"', part, re.MULTILINE)
    return found[1] if found else ""


def family(version: str) -> str | None:
    """What a version is built for: ``cpu``, ``cuda12``, ``rocm6.4``; empty without a label, None for an unknown one.

    >>> [family(version) for version in ("2.9.1+cu128", "2.9.1+cpu", "2.9.1", "2.9.1+ours")]
    ['cuda12', 'cpu', '', None]
    """
    label = version.partition("+")[2]
    if cuda := re.fullmatch(r"cu(\d+)\d", label):
        return f"cuda{cuda[1]}"
    return label if re.fullmatch(r"(cpu|rocm[\d.]+|xpu|)", label) else None


def is_for_gpus(packages: Iterable[str]) -> bool:
    """Whether the torch that brings these packages is a build for GPUs.

    >>> is_for_gpus(["numpy", "nvidia-cublas"]), is_for_gpus(["numpy"])
    (True, False)
    """
    return any(re.match(r"nvidia-|cuda-|triton$|pytorch-triton", package) for package in packages)


def cuda_for(driver: str) -> int | None:
    """The newest major version of CUDA that an NVIDIA driver supports.

    >>> cuda_for("550.54.14"), cuda_for("390.1")
    (12, None)
    """
    version = numbers(driver)
    return next((cuda for cuda, oldest in DRIVERS.items() if version >= oldest), None)


def fit(one: str, other: str, arch: str) -> bool:
    """Whether two versions are built for the same devices. Without a label it is CUDA on x86_64, elsewhere any."""
    families = {family(one), family(other)}
    if len(families) == 1 or None in families:
        return True
    if "" in families:
        return arch != "x86_64" or any(named and named.startswith("cuda") for named in families)
    return False


def strangers(text: str, arch: str, trusted: Set[str] = frozenset()) -> list[Build]:
    """The companions of a lock that do not fit its torch. Packages from the same source are assumed to fit."""
    builds = of_lock(text)
    torch = builds.pop("torch", None)
    if torch is None:
        return []
    others = [build for name, build in sorted(builds.items()) if name not in trusted]
    return [build for build in others if build.source != torch.source and not fit(torch.version, build.version, arch)]
