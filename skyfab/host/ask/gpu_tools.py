"""What the vendors' tools say about GPUs: nvidia-smi, rocm-smi and system_profiler. Runs on hosts."""

from __future__ import annotations

import json
import os
import shutil

TYPE_CHECKING = False  # importing `typing` would slow the start of a worker
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Final

    Found = dict[str, Any]
    Run = Callable[[list[str]], str]

_TIMEOUT: Final = 10.0
"""Seconds that a tool may take. With a broken driver, nvidia-smi never ends."""
_MIB: Final = 1024 * 1024
_BASIC: Final = ("index", "uuid", "name", "memory.total", "memory.used", "utilization.gpu", "temperature.gpu")
_MORE: Final = ("driver_version", "clocks_throttle_reasons.active", "ecc.errors.uncorrected.volatile.total")
_PROCESSES: Final = ("gpu_uuid", "pid", "used_memory")
_THROTTLED: Final = {
    0x04: "its power limit",
    0x08: "the hardware",
    0x20: "its temperature",
    0x40: "its temperature (hardware)",
    0x80: "the power supply",
}
"""Bits of nvidia-smi's throttle reasons that mean a slower GPU; idle, and clocks that were set, are fine."""


class ToolFailed(Exception):
    """A tool could not be run, or has printed something else than what it was asked for."""


def look_at_gpus() -> Found:
    """`gpus`, a list; `gpu_tool`, which listed them, or null; `gpu_error`, why it failed, or null."""
    for tool, look in (("nvidia-smi", nvidia), ("rocm-smi", amd), ("system_profiler", apple)):
        if shutil.which(tool) is None:
            continue
        try:
            return {"gpu_tool": tool, "gpu_error": None, "gpus": look(_run)}
        except (ToolFailed, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            said = str(error) if isinstance(error, ToolFailed) else "unexpected output"
            return {"gpu_tool": tool, "gpu_error": f"{tool}: {said}", "gpus": []}
    return {"gpu_tool": None, "gpu_error": None, "gpus": []}


def _run(words: list[str]) -> str:
    import subprocess  # imported late: most hosts of a lab have no tool

    try:
        done = subprocess.run(words, capture_output=True, timeout=_TIMEOUT, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise ToolFailed(f"no response within {_TIMEOUT:.0f} s: is the driver working?") from None
    except OSError as error:
        raise ToolFailed(error.strerror or str(error)) from None
    if done.returncode:
        said = (done.stdout + done.stderr).decode(errors="replace").strip().splitlines()
        raise ToolFailed(said[0][:200] if said else f"exit code {done.returncode}")
    return done.stdout.decode(errors="replace")


# ---- NVIDIA


def nvidia(run: Run) -> list[Found]:
    """GPUs in the order of nvidia-smi, which is that of the PCI bus."""
    fields: tuple[str, ...] = _BASIC + _MORE
    try:
        rows = _query(run, "gpu", fields)
    except ToolFailed as failed:
        if "not a valid field" not in str(failed):
            raise
        fields = _BASIC  # an old driver, or a new one
        rows = _query(run, "gpu", fields)
    processes = _query(run, "compute-apps", _PROCESSES)
    found = []
    for row in rows:
        about = dict(zip(fields, row, strict=True))
        reasons = about.get("clocks_throttle_reasons.active", "")
        bits = int(reasons, 16) if reasons.startswith("0x") else 0
        found.append(
            {
                "index": int(about["index"]),
                "name": about["name"],
                "memory": _mib(about["memory.total"]),
                "memory_used": _mib(about["memory.used"]),
                "use": _number(about["utilization.gpu"]),
                "temperature": _number(about["temperature.gpu"]),
                "driver": about.get("driver_version"),
                "throttled": [text for bit, text in _THROTTLED.items() if bits & bit],
                "ecc_errors": _number(about.get("ecc.errors.uncorrected.volatile.total", "")),
                "processes": [
                    {"pid": int(pid), "memory": _mib(memory), **_owner(int(pid))}
                    for uuid, pid, memory in processes
                    if uuid == about["uuid"]
                ],
            }
        )
    return found


def _query(run: Run, what: str, fields: tuple[str, ...]) -> list[list[str]]:
    text = run(["nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"])
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    rows = [row for row in rows if not row[0].lower().startswith("no ")]  # "No running processes found"
    for row in rows:
        if len(row) != len(fields):
            raise ToolFailed(f"unexpected output: {', '.join(row)[:200]}")
    return rows


def _number(text: str) -> int | None:
    """Tools write ``[N/A]`` or ``[Not Supported]`` for what they cannot know."""
    return int(float(text)) if text.replace(".", "", 1).isdigit() else None


def _mib(text: str) -> int | None:
    number = _number(text)
    return None if number is None else number * _MIB


def _owner(pid: int) -> dict[str, str | None]:
    """Who runs a process, and what it is. Null in a container, whose processes have other numbers."""
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
        with open(f"/proc/{pid}/comm", errors="replace") as file:
            command: str | None = file.read().strip()
    except OSError:
        return {"user": None, "command": None}
    return {"user": user_name(uid), "command": command}


def user_name(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


# ---- AMD and Apple


def amd(run: Run) -> list[Found]:
    words = ["rocm-smi", "--showproductname", "--showmeminfo", "vram", "--showuse", "--showtemp", "--json"]
    cards = json.loads(run(words))
    found = []
    for card, values in cards.items():
        if not card.startswith("card"):
            continue
        known = {name.lower(): str(value) for name, value in values.items()}
        heat = next((value for name, value in known.items() if name.startswith("temperature (sensor ")), "")
        found.append(
            {
                "index": int(card[4:]),
                "name": known.get("card series") or known.get("card model") or "AMD GPU",
                "memory": _number(known.get("vram total memory (b)", "")),
                "memory_used": _number(known.get("vram total used memory (b)", "")),
                "use": _number(known.get("gpu use (%)", "")),
                "temperature": _number(heat),
            }
        )
    return found


def apple(run: Run) -> list[Found]:
    """Its memory is that of the machine, and only administrators can read how much it is used."""
    displays = json.loads(run(["system_profiler", "SPDisplaysDataType", "-json"]))["SPDisplaysDataType"]
    return [
        {"index": number, "name": str(one["sppci_model"])}
        for number, one in enumerate(one for one in displays if "sppci_model" in one)
    ]
