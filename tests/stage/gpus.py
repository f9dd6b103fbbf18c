"""Lab hosts with GPUs: a program that is called nvidia-smi."""

from __future__ import annotations

from skyfab.lab import Lab

_SMI = """#!/bin/sh
case $1 in
  *compute-apps*) {processes} ;;
  *) {gpus} ;;
esac
"""
BROKEN = "echo 'NVIDIA-SMI has failed because the driver is not running'; exit 9"
"""As `gpus` of `plant`: a driver that does not work."""


def plant(lab: Lab, name: str, gpus: str, processes: str = ":") -> None:
    """Gives a host GPUs: `gpus` and `processes` are shell commands, as `gpu` makes them."""
    path = lab[name].path("/usr/local/bin/nvidia-smi")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_SMI.format(gpus=gpus, processes=processes))
    path.chmod(0o755)


def gpu(
    index: int = 0, *, used: int = 10, use: int = 0, driver: str = "550.54", throttled: str = "0x0", ecc: int = 0
) -> str:
    """Prints an H100 that uses so many MiB, and so many percent of its time."""
    return f"echo '{index}, GPU-{index}, NVIDIA H100, 81559, {used}, {use}, 88, {driver}, {throttled}, {ecc}'"
