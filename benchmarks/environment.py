"""Benchmark: building a torch environment on hosts without internet access, against doing the same by hand."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.request import urlopen

import skyfab as sky
from benchmarks.arena import Arena
from benchmarks.relay import Relay
from benchmarks.result import Bar, Result, Skip
from benchmarks.sample import Sample, alternate
from skyfab.env import probe
from skyfab.env.facts import Target
from skyfab.env.install import Package, missing, push
from skyfab.env.lock import Lock, make_lock
from skyfab.env.resolve import LockError
from skyfab.env.tools import uv_for
from skyfab.env.wheels import fetch
from skyfab.inventory.host import Host
from skyfab.session.bootstrap import local_python, open_shell
from skyfab.ssh import transport_for

_DELAY = 0.05
"""One-way delay in seconds to a simulated distant host."""


class Environment:
    name = "env"
    about = "a torch environment on fresh hosts without a route out, against fetch, scp and uv by hand"

    def run(self, arena: Arena) -> Iterator[Result]:
        with Workshop.open(arena) as workshop:
            one, by_hand, four = alternate(
                arena.scale.builds, workshop.fresh, workshop.by_hand, lambda: workshop.fresh(hosts=4)
            )
            size = workshop.size / 1e6
            yield Result(
                row=self.name,
                what=f"{size:.0f} MB on a fresh host",
                unit="s",
                ours=one,
                baseline=by_hand,
                against="by hand",
                bar=Bar(1.5),
            )
            yield Result(
                row=self.name,
                what=f"on {len(arena.hosts)} fresh hosts at once",
                unit="s",
                ours=four,
                baseline=one,
                against="on one",
                bar=Bar(2.5),
            )
            yield Result(
                row=self.name,
                what=f"on {len(arena.hosts)} fresh hosts at once, bytes that leave",
                unit="MB",
                ours=Sample.of(workshop.leaving(hosts=4)),
                baseline=Sample.of(workshop.leaving(hosts=1)),
                against="for one",
                bar=Bar(1.1),
            )
            pushed, raw = alternate(arena.scale.builds, workshop.push, workshop.cat)
            yield Result(
                row=self.name,
                what="pushing packages",
                unit="MB/s",
                ours=pushed.each(lambda seconds: size / seconds),
                baseline=raw.each(lambda seconds: size / seconds),
                against="ssh 'cat > file'",
                bar=Bar(0.8, "at least"),
            )
            yield Result(
                row=self.name,
                what="sent for one more small package",
                unit="MB",
                ours=Sample.of(workshop.one_more()),
                bar=Bar(1.0, on="value"),
            )
            for what, extra in (("as last time", workshop.found), ("by a program that is new", workshop.found_anew)):
                yield Result(
                    row=self.name,
                    what=f"an environment that is there, {what}",
                    unit="round trips",
                    ours=Sample(tuple(extra() for _ in range(arena.scale.builds))),
                    bar=Bar(2.0, on="value"),
                )


@dataclass(frozen=True, slots=True)
class Workshop:
    """Hosts, packages, and both ways to install them. All new files are in folders that are deleted at the end."""

    arena: Arena
    image: sky.Image
    lock: Lock
    target: Target
    folder: Path
    numbers: Iterator[int]

    @classmethod
    @contextmanager
    def open(cls, arena: Arena) -> Iterator[Workshop]:
        with tempfile.TemporaryDirectory(prefix="skyfab-bench-") as folder, _cache(Path(folder) / "cache"):
            with open_shell(arena.first, transport_for(arena.first, arena.inventory)) as shell:
                target = Target.of(probe.parse(shell.run(probe.script())), local_python())
            image = sky.Image(pip=_requirements(arena.scale.packages))
            try:
                lock = make_lock(image, target)
            except LockError as error:
                raise Skip(error.message.partition("\n")[0]) from error
            made = cls(arena, image, lock, target, Path(folder), itertools.count())
            try:
                yield made
            finally:
                made.clean()

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in fetch(self.lock.wheels).values())

    # ---- by skyfab

    def fresh(self, hosts: int = 1) -> float:
        """Seconds to build it on hosts with an empty cache, from a program with an empty cache."""
        cache = self._place()
        strangers = [replace(host, cache=cache) for host in self.arena.hosts[:hosts]]
        with _cache(self.folder / f"own{next(self.numbers)}"):
            took = self._open(strangers, self.image)
        for host in self.arena.lab.hosts[:hosts]:
            host.run(["rm", "-rf", cache])
        return took

    def leaving(self, hosts: int) -> float:
        """Megabytes that leave this machine meanwhile."""
        before = self.arena.left
        self.fresh(hosts)
        return (self.arena.left - before) / 1e6

    def _open(self, hosts: Sequence[Host], image: sky.Image | None) -> float:
        pool = sky.Compute(hosts, inventory=self.arena.inventory, image=image, ui="none")
        started = time.perf_counter()
        pool.open()
        took = time.perf_counter() - started
        pool.close()
        return took

    def push(self) -> float:
        packages = [Package.of_file(path) for path in fetch(self.lock.wheels).values()]
        host = replace(self.arena.first, cache=self._place())
        with open_shell(host, transport_for(host, self.arena.inventory)) as shell:
            missing(shell, packages)
            started = time.perf_counter()
            push(shell, packages, session="bench", progress=lambda done, total: None)
            return time.perf_counter() - started

    def one_more(self) -> float:
        """Megabytes sent for a second image that has one more package."""
        host = replace(self.arena.first, cache=self._kept)
        extra = replace(self.image, pip=(*self.image.pip, self.arena.scale.extra))
        self._open([host], self.image)
        before = self._held(host)
        self._open([host], extra)
        return (self._held(host) - before) / 1e6

    def _held(self, host: Host) -> int:
        sizes = self.arena.first_machine.run(["find", f"{host.cache}/packages", "-type", "f", "-printf", "%s\\n"])
        return sum(map(int, sizes.stdout.split()))

    def found(self) -> float:
        """Extra round trips, compared to connecting only, for an environment that exists already."""
        return self._extra(forget=False)

    def found_anew(self) -> float:
        """The same for a program that has not connected to the host before."""
        return self._extra(forget=True)

    def _extra(self, *, forget: bool) -> float:
        """Compares a near and a far host: time that does not grow with the delay is work, not round trips."""
        near, far = (self._more(forget, delay) for delay in (0.0, _DELAY))
        return max(0.0, (far - near) / (2 * _DELAY))

    def _more(self, forget: bool, delay: float) -> float:
        """Extra seconds, compared to connecting only."""
        first = self.arena.first
        with Relay(str(first.address), first.port, delay) as relay:
            far = replace(first, address="127.0.0.1", port=relay.port, cache=self._kept)
            self._open([far], self.image)  # it was built by `one_more`
            self._open([far], None)
            with _cache(self.folder / f"new{next(self.numbers)}" if forget else _home()):
                make_lock(self.image, self.target)
                with_it, without = self._open([far], self.image), self._open([far], None)
        return with_it - without

    # ---- by hand

    def by_hand(self) -> float:
        """Seconds for download, scp, uv venv, uv pip sync --offline."""
        place = f"{self._place()}-by-hand"
        wheels = self.folder / f"hand{next(self.numbers)}"
        started = time.perf_counter()
        wheels.mkdir()
        for wheel in self.lock.wheels:
            with urlopen(wheel.url) as source, (wheels / wheel.filename).open("wb") as file:
                shutil.copyfileobj(source, file, 1024 * 1024)
        (wheels / "pylock.toml").write_text(self.lock.placed(lambda wheel: wheel.filename))
        shutil.copy(uv_for(self.target), wheels / "uv")
        with self.arena.ssh_config() as config:
            subprocess.run(["scp", "-qr", "-F", config, str(wheels), f"{self.arena.first.name}:{place}"], check=True)
        python = shlex.quote(self.arena.first.python)
        uv = f"UV_CACHE_DIR={place}/cache UV_OFFLINE=1 ./uv"
        sync = f"{uv} pip sync -q --python venv/bin/python pylock.toml"
        script = f"cd {place} && {uv} venv -q --python {python} venv && {sync} 2>/dev/null"
        with self.arena.ssh(self.arena.first, script) as argv:
            subprocess.run(argv, stdin=subprocess.DEVNULL, check=True)
        took = time.perf_counter() - started
        self.arena.first_machine.run(["rm", "-rf", place])
        shutil.rmtree(wheels)
        return took

    def cat(self) -> float:
        """Seconds to send the same number of bytes into one file."""
        paths = list(fetch(self.lock.wheels).values())
        place = self._place()
        with self.arena.ssh(self.arena.first, f"cat > {place}.bin") as argv:
            started = time.perf_counter()
            with subprocess.Popen(argv, stdin=subprocess.PIPE, bufsize=0) as process:
                assert process.stdin
                for path in paths:
                    with path.open("rb") as file:
                        while piece := file.read(1024 * 1024):
                            process.stdin.write(piece)
            return time.perf_counter() - started

    # ---- paths

    def _place(self) -> str:
        return f"{self._root}/{next(self.numbers)}"

    @property
    def _kept(self) -> str:
        """A host's cache that several measurements share."""
        return f"{self._root}/kept"

    @property
    def _root(self) -> str:
        return f"/var/tmp/{self.folder.name}"

    def clean(self) -> None:
        for host in self.arena.lab.hosts:
            host.run(["sh", "-c", f"rm -rf {self._root}"])


def _requirements(packages: Sequence[str]) -> tuple[str, ...]:
    """Pins torch to the version that is installed here."""
    if "torch" not in packages:
        return tuple(packages)
    try:
        import torch
    except ImportError as error:
        raise Skip("torch is not installed here") from error
    version = torch.__version__.partition("+")[0]
    return tuple(f"torch=={version}" if name == "torch" else name for name in packages)


def _home() -> Path:
    return Path(os.environ["XDG_CACHE_HOME"])


@contextmanager
def _cache(folder: Path) -> Iterator[None]:
    """Uses another cache folder on this machine. uv's own cache is kept."""
    os.environ.setdefault("UV_CACHE_DIR", str(Path.home() / ".cache" / "uv"))
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["XDG_CACHE_HOME"]
        else:
            os.environ["XDG_CACHE_HOME"] = before
