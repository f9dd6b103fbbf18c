"""Shell scripts that build an environment on a host, and the upload of the files that they need.

Below the host's cache folder: ``packages/SHA256/FILE`` (wheels, uv, interpreters and locks, named by content),
``envs/DIGEST`` (environments), ``pythons/SHA256`` (interpreters, unpacked), ``uv`` (uv's own cache, to which
environments have hard links). Everything is created under a temporary name, and renamed when it is complete.
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Final

from skyfab.env.wheels import Wheel
from skyfab.protocol.blobs import name_of
from skyfab.session.shell import Shell

_CHUNK: Final = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A file that a host may need, named by its content."""

    sha256: str
    filename: str
    size: int
    content: Path | bytes
    program: bool = False
    """Whether it is executable."""

    @property
    def place(self) -> str:
        """Its path below ``packages``."""
        return f"{self.sha256}/{self.filename}"

    @property
    def path(self) -> str:
        """Its path on the host, as a shell word."""
        return f'"$c"/packages/{quote(self.place)}'

    @classmethod
    def of_file(cls, path: Path, *, sha256: str | None = None, program: bool = False) -> Package:
        if sha256 is None:
            sha256 = _digest(path)
        return cls(sha256=sha256, filename=path.name, size=path.stat().st_size, content=path, program=program)

    @classmethod
    def of_wheel(cls, wheel: Wheel) -> Package:
        """From the lock alone, without content: enough to check whether the host has it."""
        return cls(sha256=wheel.sha256, filename=wheel.filename, size=wheel.size or 0, content=b"")

    @classmethod
    def of_text(cls, filename: str, text: str) -> Package:
        content = text.encode()
        return cls(sha256=name_of(content), filename=filename, size=len(content), content=content)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_CHUNK):
            digest.update(piece)
    return digest.hexdigest()


# ---- what the host has


def enter(shell: Shell, digest: str) -> str | None:
    """Starts the environment's interpreter; ``absent`` if there is none."""
    home = f'"$c"/envs/{digest}'
    return shell.go(f"{home}/bin/python", provided=f"test -x {home}/bin/python && true >{home}/.used")


def missing(shell: Shell, packages: Sequence[Package]) -> list[Package]:
    """Returns the packages that the host does not have."""
    script = f"""
while IFS= read -r f; do test -f "$c/packages/$f" && touch -c "$c/packages/${{f%%/*}}" || echo "$f"; done <<'END'
{"".join(f"{package.place}{chr(10)}" for package in packages)}END"""
    lacking = set(shell.run(script).splitlines())
    return [package for package in packages if package.place in lacking]


def discard(shell: Shell, packages: Sequence[Package]) -> None:
    """Deletes packages whose content may not match their digest."""
    shell.run(f'cd "$c/packages" && rm -rf {" ".join(package.sha256 for package in packages)}')


# ---- pushing


def push(shell: Shell, packages: Sequence[Package], *, session: str, progress: Callable[[int, int], None]) -> None:
    """Uploads packages as one tar archive. Raises ScriptFailed with tar's output.

    SSH protects the data in transit, and uv verifies each wheel against the lock: no hash is checked here.
    """
    total = sum(package.size for package in packages)
    script = f"""
t=$c/packages/.in-{session}
trap 'rm -rf "$t"' EXIT
mkdir -p "$t" && cd "$t" && tar xmf - || exit 1
for p in *; do test -d "../$p" || mv "$p" .. || test -d "../$p" || exit 1; done"""
    shell.run(script, feed=_archive(packages, total, progress))


def _archive(packages: Sequence[Package], total: int, progress: Callable[[int, int], None]) -> Iterator[bytes]:
    """A tar archive of the packages, in pieces."""
    done = size = 0
    for package in packages:
        entry = tarfile.TarInfo(package.place)
        entry.size = package.size
        entry.mode = 0o700 if package.program else 0o600
        header = entry.tobuf(tarfile.GNU_FORMAT)
        yield header
        for piece in _pieces(package):
            yield piece
            done += len(piece)
            progress(done, total)
        padding = -package.size % tarfile.BLOCKSIZE
        yield bytes(padding)
        size += len(header) + package.size + padding
    # tar reads whole records, and would wait for the rest of an incomplete last one.
    yield bytes(-(size + 2 * tarfile.BLOCKSIZE) % tarfile.RECORDSIZE + 2 * tarfile.BLOCKSIZE)


def _pieces(package: Package) -> Iterator[bytes]:
    if isinstance(package.content, bytes):
        yield package.content
        return
    with package.content.open("rb") as file:
        left = package.size
        while left:
            piece = file.read(min(left, _CHUNK))
            if not piece:
                raise OSError(f"{package.filename} became shorter while it was read")
            left -= len(piece)
            yield piece


# ---- building


def unpack_python(shell: Shell, archive: Package) -> str:
    """Unpacks an interpreter from its archive; returns its path on the host."""
    said = shell.run(f"""
h=$c/pythons/{archive.sha256} t=$c/pythons/.in-{archive.sha256}-$$
touch -c "$h"  # for `gc`: it is in use
if ! test -d "$h"; then
  trap 'rm -rf "$t"' EXIT
  mkdir -p "$t" && tar xzf {archive.path} -C "$t" || exit 1
  mv "$t" "$h" 2>/dev/null || test -d "$h" || exit 1
fi
for p in "$h"/*/bin/python3; do echo "$p"; done""")
    return said.splitlines()[-1]


def install_apt(shell: Shell, packages: Sequence[str]) -> None:
    """Installs missing Debian packages, if the user may do so. Raises ScriptFailed."""
    words = " ".join(map(quote, packages))
    shell.run(f"""
n=
for p in {words}; do dpkg-query -W -f '${{Status}}' "${{p%%=*}}" 2>/dev/null | grep -q 'ok installed' || n="$n $p"; done
test -n "$n" || exit 0
command -v apt-get >/dev/null || {{ echo "apt packages are missing, and there is no apt-get:$n"; exit 1; }}
s=
if test "$(id -u)" != 0; then
  sudo -n true 2>/dev/null || {{ echo "apt packages are missing, and this user may not install any:$n"; exit 1; }}
  s="sudo -n"
fi
export DEBIAN_FRONTEND=noninteractive
a="$s apt-get -qq -o DPkg::Lock::Timeout=120"
i="$a install -y --no-install-recommends"
$i $n >/dev/null 2>&1 || {{ $a update >/dev/null 2>&1; $i $n; }}""")


def build(
    shell: Shell,
    digest: str,
    *,
    session: str,
    uv: str,
    python: str,
    lock: Package,
    offline: bool,
    refresh: Sequence[str] = (),
) -> None:
    """Builds the environment, unless another process was faster. Raises ScriptFailed with uv's output.

    `uv` is a shell word; `python` a path, or a version that uv finds or downloads. The packages in `refresh` are
    deleted from uv's cache: uv's own refresh options skip what an index has declared immutable.
    """
    forget = f"{uv} cache clean -q {' '.join(map(quote, refresh))} || exit 1" if refresh else ""
    shell.run(f"""
n=$(uname -n | tr -cd 'A-Za-z0-9.-')
e=$c/envs/{digest} t=$c/envs/.in-{digest}-$n-{session}
mkdir -p "$c/envs" || exit 1
f=
if command -v flock >/dev/null; then exec 9>"$c/envs/.lock-{digest}" || exit 1; flock 9 2>/dev/null && f=1; fi
if test -x "$e/bin/python" && test -f "$e/.ready"; then exit 0; fi
# of those that were killed here: locks may not reach another host that shares this folder
if test -n "$f"; then for p in "$c"/envs/.in-{digest}-"$n"-*; do rm -rf "$p"; done; fi
rm -rf "$e"
trap 'rm -rf "$t"' EXIT
unset VIRTUAL_ENV CONDA_PREFIX PYTHONPATH PYTHONHOME
export UV_CACHE_DIR="$c/uv" UV_PYTHON_INSTALL_DIR="$c/pythons/uv" UV_NO_CONFIG=1 UV_NO_PROGRESS=1
export UV_PYTHON_DOWNLOADS={"never" if offline else "automatic"} {"UV_OFFLINE=1" if offline else ""}
{forget}
{uv} venv -q --relocatable --no-project --python {quote(python)} "$t" || exit 1
{uv} pip sync -q --python "$t/bin/python" {lock.path} || exit 1
: >"$t/.ready"
: >"$t/.used"
"$t/bin/python" -I -S -c 'import os, sys; os.rename(*sys.argv[1:])' "$t" "$e" || test -f "$e/.ready" """)
