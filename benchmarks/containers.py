"""Benchmark: two containers, from nothing to an open pool, against `podman run` and `ssh true` by hand."""

from __future__ import annotations

import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import skyfab as sky
from benchmarks.arena import Arena
from benchmarks.result import Bar, Result, Skip
from benchmarks.sample import alternate
from tools.container_image import IMAGE, Unavailable, configure, make


class Containers:
    name = "containers"
    about = "two containers ready for a call, against `podman run` and `ssh true` for each of the two by hand"

    def run(self, arena: Arena) -> Iterator[Result]:
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, configure(Path(folder))):
            try:
                make()
            except Unavailable as error:
                raise Skip(str(error)) from None
            ours, baseline = alternate(arena.scale.first, _ours, _by_hand)
        yield Result(
            row=self.name,
            what="two containers ready for a call",
            unit="s",
            ours=ours,
            baseline=baseline,
            against="podman run, ssh true",
            bar=Bar(1.3),
        )


def _ours() -> float:
    """Until the pool is open: a call could be made."""
    started = time.perf_counter()
    with sky.Compute(provider=sky.Container(nodes=2, image=IMAGE), ui="none"):
        return time.perf_counter() - started


def _by_hand() -> float:
    """One after the other, as a person types it: start it with a key, look up its port, log in."""
    names = [f"by-hand-{secrets.token_hex(4)}" for _ in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder, "key")
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        serve = (
            f"mkdir -p /run/sshd /root/.ssh; echo '{key.with_name('key.pub').read_text().strip()}'"
            " >/root/.ssh/authorized_keys; exec /usr/sbin/sshd -D -e"
        )
        started = time.perf_counter()
        try:
            for name in names:
                _podman("run", "--rm", "-d", "-p", "127.0.0.1::22", "--name", name, IMAGE, "sh", "-c", serve)
                port = _podman("port", name, "22").strip().rpartition(":")[2]
                ssh = ["ssh", "-F", "none", "-i", str(key), "-p", port, "-o", "StrictHostKeyChecking=no"]
                ssh += ["-o", f"UserKnownHostsFile={folder}/known_hosts", "root@127.0.0.1", "true"]
                while subprocess.run(ssh, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode:
                    time.sleep(0.01)
            return time.perf_counter() - started
        finally:
            subprocess.run(["podman", "rm", "-f", "-t", "0", *names], capture_output=True)


def _podman(*words: str) -> str:
    return subprocess.run(["podman", *words], check=True, capture_output=True, text=True).stdout
