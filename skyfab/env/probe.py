"""The probe: a shell script that collects facts about a host (system, Python, uv, GPUs, disk), and its parser.

The script, probe.sh, is plain POSIX sh and needs no Python on the host. Facts that take long to collect and rarely
change are stored in the cache folder, until the machine reboots, the script or the NVIDIA driver changes, or a searched
folder has changed. Nothing is stored for a host without Python, or if a command timed out.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from skyfab._util.scripts import given, read

from .facts import Facts, Gpu, Program

_PYTHON: Final = read("env/probe_python.py")
_INDEX: Final = read("env/probe_index.py")
_SCRIPT: Final = read("env/probe.sh")
_VERSION: Final = hashlib.sha256((_PYTHON + _SCRIPT).encode()).hexdigest()[:16]

_TEXT: Final = 256 * 1024
_VALUE: Final = 4096
_MANY: Final = 64


def script(indexes: Sequence[str]) -> str:
    """The script, for a shell that has the cache folder's full path in ``c``.

    It also sends a request to each of `indexes`; any response counts. Left out are those that do not begin with http,
    which are not on a network, and those with a control character, which are not URLs.
    """
    urls = [url for url in indexes if re.fullmatch(r"(?i:https?)://[^\x00-\x1f\x7f]+", url)]
    return given(*urls, v=_VERSION, P=_PYTHON, A=_INDEX) + _SCRIPT


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

    gpus, driver = _gpus(said)
    filesystem, noexec = _mount(last("mount"))
    uv = re.fullmatch(r"(\d[\w.+-]{0,40}) (/.+)", last("uv"))
    free = re.search(r" (\d{1,18}) +\d+% +/", last("disk"))
    return Facts(
        boot=word("boot"),
        system=word("system"),
        arch=word("arch"),
        libc=_libc(last("libc")),
        release=_unquoted(last("release")),
        shell=last("shell"),
        user=last("user"),
        pythons=_pythons(said.get("python", [])),
        uv=Program(version=uv[1], path=uv[2]) if uv else None,
        gpus=gpus,
        driver=driver,
        rocm=word("rocm"),
        cache=_cache(last("cachex"), last("cache")),
        free=int(free[1]) * 1024 if free else 0,
        filesystem=filesystem or last("kind"),
        noexec=noexec,
        files=_number(last("files")),
        processes=_number(last("processes")),
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


def _gpus(said: dict[str, list[str]]) -> tuple[tuple[Gpu, ...], str]:
    """The GPUs, and the NVIDIA driver's version: from nvidia-smi, or else from the driver itself."""
    rows = [[cell.strip() for cell in line.rsplit(",", 2)] for line in said.get("nvidia", [])]
    rows = [row for row in rows if len(row) == 3 and row[0] and re.fullmatch(r"\d+(\.\d+)+", row[2])]
    gpus = [Gpu(name=name, memory=_number(memory)) for name, memory, _ in rows]
    driver = rows[0][2] if rows else ""
    if not gpus:
        gpus = [Gpu(name=name.strip(), memory=0) for name in said.get("model", []) if name.strip()]
        match = re.search(r" (\d{2,5}(?:\.\d+)+) ", said.get("nvrm", [""])[-1] + " ")
        driver = match[1] if match else ""
    for line in said.get("amd", []):
        size, _, name = line.partition(" ")
        gpus.append(Gpu(name=name.strip() or "AMD GPU", memory=_number(size) >> 20))
    return tuple(gpus[:_MANY]), driver


def _libc(said: str) -> str:
    """`said` is getconf's line, or the first two lines of ldd or of musl's loader."""
    match = re.search(r"^glibc (\d{1,3}\.\d{1,3})\b|^ldd \(.*?\) (\d{1,3}\.\d{1,3})\b", said)
    if match:
        return f"glibc {match[1] or match[2]}"
    match = re.search(r"^musl .*?Version (\d{1,3}(?:\.\d{1,3}){1,3})(?!\d)", said)
    return f"musl {match[1]}" if match else ""


def _mount(line: str) -> tuple[str, bool]:
    """The file system, and whether it is mounted noexec: from /proc/mounts, or from the output of macOS's `mount`."""
    match = re.search(r" \(([^()]+)\)$", line)
    words = line.split(" ")
    if match:
        kind, *options = match[1].split(", ")
    elif len(words) == 6:
        kind, options = words[2], words[3].split(",")
    else:
        return "", False
    return kind, "noexec" in options


def _unquoted(value: str) -> str:
    """A value of os-release: a shell word, often quoted."""
    with suppress(ValueError):
        words = shlex.split(value)
        return words[0] if len(words) == 1 else value.strip()
    return value.strip()


def _cache(digits: str, plain: str) -> str:
    """The path; `digits` has its bytes in hexadecimal if they are not a printable line."""
    with suppress(ValueError):
        plain = os.fsdecode(bytes.fromhex(digits)) or plain
    return plain if plain.startswith("/") and "\0" not in plain else ""


def _number(said: str) -> int:
    return int(said) if re.fullmatch(r"[0-9]{1,18}", said) else 0
