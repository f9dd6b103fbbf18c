"""The probe: a shell script that collects facts about a host (system, Python, uv, drivers, disk), and its parser.

The script, probe.sh, is plain POSIX sh and needs no Python on the host.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from skyfab._util.scripts import given, read

from .facts import Facts, Program

_PYTHON: Final = read("env/probe_python.py")
_INDEX: Final = read("env/probe_index.py")
_SCRIPT: Final = read("env/probe.sh")

_TEXT: Final = 256 * 1024
_VALUE: Final = 4096
_MANY: Final = 64


def script(indexes: Sequence[str] = (), python: str = "") -> str:
    """The script, for a shell that has the cache folder's full path in ``c``.

    With `indexes`, it only sends a request to each of them, with curl or else with the interpreter `python`; any
    response counts.
    """
    return given(*indexes, P=_PYTHON, A=_INDEX, w=python) + _SCRIPT


def parse(text: str) -> Facts:
    """Parses the script's output. Never raises: invalid values count as missing.

    The host is trusted about itself; the caller must check that a reported index is one of those queried.
    """
    said: dict[str, list[str]] = {}
    for line in re.sub(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", "", text[:_TEXT]).split("\n"):
        key, _, value = line.partition(" ")
        said.setdefault(key, []).append(value[:_VALUE])

    def last(key: str) -> str:
        return said.get(key, [""])[-1]

    def word(key: str) -> str:
        return last(key) if re.fullmatch(r"[\w.+-]{1,100}", last(key)) else ""

    uv = re.fullmatch(r"(\d[\w.+-]{0,40}) (/.+)", last("uv"))
    free = re.search(r" (\d{1,18}) +\d+% +/", last("disk"))
    return Facts(
        boot=word("boot"),
        system=word("system"),
        arch=word("arch"),
        libc=_libc(last("libc")),
        pythons=_pythons(said.get("python", [])),
        uv=Program(version=uv[1], path=uv[2]) if uv else None,
        driver=_driver(last("driver"), last("nvrm")),
        rocm=word("rocm"),
        cache=last("cache"),
        free=int(free[1]) * 1024 if free else 0,
        noexec="noexec" in last("mount").split(","),
        reachable=tuple(dict.fromkeys(url for url in said.get("index", [])[:_MANY] if url)),
    )


def _pythons(lines: Sequence[str]) -> tuple[Program, ...]:
    """In the order of PATH: they responded in any order."""
    found: dict[str, tuple[int, str]] = {}
    for line in lines:
        match = re.fullmatch(r"(\d{1,3}) (3\.(\d{2,3})\.\d[\w.+]{0,20}) (/.+)", line)
        if match and int(match[3]) >= 10:
            found[match[4]] = min((int(match[1]), match[2]), found.get(match[4], (1000, "")))
    ordered = sorted(found.items(), key=lambda item: item[1][0])
    return tuple(Program(path=path, version=version) for path, (_, version) in ordered[:_MANY])


def _driver(smi: str, module: str) -> str:
    """The NVIDIA driver's version: as the kernel's module tells it, or else nvidia-smi."""
    match = re.search(r" (\d{2,5}(?:\.\d+)+) ", f"{module} ") or re.fullmatch(r"(\d+(?:\.\d+)+)", smi.strip())
    return match[1] if match else ""


def _libc(said: str) -> str:
    """`said` is getconf's line, or the first two lines of ldd or of musl's loader."""
    match = re.search(r"^glibc (\d{1,3}\.\d{1,3})\b|^ldd \(.*?\) (\d{1,3}\.\d{1,3})\b", said)
    if match:
        return f"glibc {match[1] or match[2]}"
    match = re.search(r"^musl .*?Version (\d{1,3}(?:\.\d{1,3}){1,3})(?!\d)", said)
    return f"musl {match[1]}" if match else ""
