"""Garbage collection: deletes what was not used for a while from a host's cache folder, and from this machine's cache.

On a host it is one shell script, without Python. It recognizes by their names what it may delete, and touches nothing
else; links are deleted and never followed. Old entries are first moved aside, atomically, and moved back if they were
used at that moment: a pool that is just starting finds an entry complete, or recreates it.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Final

from skyfab.detached.folder import ALIVE
from skyfab.env.uv import home
from skyfab.errors import HostUnfit, UsageError
from skyfab.session.shell import ScriptFailed, Shell

_HOUR: Final = 60
_DAY: Final = 24 * _HOUR
"""In minutes."""
_AGES: Final = 36500
"""Days: older than anything, and small enough for every `find`."""

_HEX: Final = "[0-9a-f]" * 16
_WORDS: Final = {
    "envs": "environment",
    "packages": "package",
    "pythons": "Python",
    "bundles": "bundle",
    "trees": "project",
    "blobs": "file",
    "logs": "log",
    "run": "run folder",
    "runs": "run",
    "files": "working folder",
    "drafts": "half-made thing",
    "wheels": "wheel",
    "locks": "lock",
    "tools": "tool",
    "hosts": "known host",
}
"""The user's word for the entries of each folder."""

# Variables: c cache folder, m marker, t where entries are moved aside, l what is to be deleted, one name per line. All
# names that are handled consist of letters, digits, dots and dashes, and need no quotes.
_BODY: Final = r"""
LC_ALL=C; export LC_ALL; umask 077
# a folder that cannot be written to cannot be moved
M='for x; do test -h "$x" || test ! -d "$x" || test -w "$x" || chmod u+rwx "$x"; done 2>/dev/null; mv -f "$@" "$0"'
s=${m#=skyfab=}; s=${s%=}; t=.in-gc-$s
test -n "$s" && test -d "$c" || exit 0
# enter FOLDER: goes there, unless it is a link
enter() { test ! -h "$c/${1%%/*}" && test ! -h "$c/$1" && test -d "$c/$1" && cd "$c/$1"; }
# here TESTS: the names in this folder that pass; hex TESTS: those that are digests
here() { find . ! -name . -prune ! -name '*[!A-Za-z0-9_.-]*' "$@" 2>/dev/null; }
hex() { here -name "$H*" ! -name '*[!0-9a-f]*' "$@"; }
is_old() { test -n "$(find "$1" -prune -mmin +$2 2>/dev/null)"; }
# take KIND BACK: moves what $l names aside; what BACK names has been used meanwhile; the rest goes
take() {
  q=0
  # a full disk has no room for a folder: the first to go makes it
  while test -n "$l" && ! y=$(mkdir "$t" 2>&1); do
    case $y in *space*|*uota*) ;; *) echo "left $y"; return 0;; esac
    rm -rf "${l%%$e*}" && q=$((q+1))
    case $l in *"$e"*) l=${l#*$e};; *) l=; esac
  done
  if test -z "$l"; then test $q = 0 || echo "gone $1 $q 0"; return 0; fi
  y=$(printf '%s\n' "$l" | xargs -n 100 sh -c "$M" "$t" 2>&1 | grep -v 'No such file' | head -n 1)
  test -z "$y" || echo "left $y"
  cd "$t" || return 0
  for x in $($2); do mv "$x" .. 2>/dev/null; done
  k=$(ls -A | wc -l); k=$((k+q)); z=$(du -sk .); cd ..
  rid "$t" && test $k != 0 && echo "gone $1 $k ${z%%[!0-9]*}"
}
rid() {
  rm -rf "$1" 2>/dev/null && return
  find "$1" -type d -exec chmod u+rwx {} \; 2>/dev/null
  y=$(rm -rf "$1" 2>&1) || { echo "left ${y##*$e}"; return 1; }
}
none() { :; }
touched() { here ! -mmin +$hour; }

# what living pools use: E environments, B bundles, O the oldest note, U one that has not said yet
look() {
  E= B= O= U=
  for x in "$c"/run/*/*; do
    test -d "$x" || continue
    y= n=$x/bundle
    if test -s "$n"; then read -r y <"$n"; else n=$x U=1; fi
    B="$B $y "; y=
    test -s "$x/env" && read -r y <"$x/env"
    E="$E $y "
    if test -z "$O" || test "$n" -ot "$O"; then O=$n; fi
  done
}
# a run folder's agent is gone: no process has its name, and none answers
processes() {
  A=$(cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\000' ' ')
  case $A in *"$s"*) return;; esac
  A=$(ps -A -ww -o args 2>/dev/null || ps ax -ww -o args 2>/dev/null)
  case $A in *"$s"*) return;; esac
  return 1
}
is_gone() {
  test -O "$1" || return 1
  case $A in *"${1##*/}"*) return 1;; esac
  test -S "$1/agent.sock" || return 0
  for p in python3 python "$c"/envs/*/bin/python; do
    command -v "$p" >/dev/null 2>&1 || continue
    "$p" -S -c "$P" "$1" 2>/dev/null
    case $? in 8) return 0;; 9) return 1;; esac
  done
  return 0
}
# pythons that environments are made from, those included that are being made
homes() { D=$(cat "$c"/envs/*/pyvenv.cfg "$c"/envs/.in-*/pyvenv.cfg "$c"/envs/.in-*/*/pyvenv.cfg 2>/dev/null); }
needed() { case $D in */pythons/"${1#./}"/*) return 0;; esac; return 1; }
needed_now() { homes; for x in $(here); do if needed $x || ! is_old $x $hour; then echo $x; fi; done; }
# environments: a link counts by itself
used() { if test ! -h "$1" && test -e "$1/.used"; then echo "$1/.used"; else echo "$1"; fi; }
is_named() { case $2 in *" ${1#./} "*) return 0;; esac; return 1; }
in_use() { test -n "$U" || is_named "$@"; }
envs_now() { look; for x in $(here); do if in_use $x "$E" || ! is_old "$(used $x)" $hour; then echo $x; fi; done; }
bundles_now() { look; for x in $(here); do if in_use $x "$B" || ! is_old $x $hour; then echo $x; fi; done; }
# working folders: a living pool has noted which it uses
is_used() { grep -qsxF -e "${1#./}" "$c"/run/*/*/files; }
files_now() { for x in $(here); do if is_used $x || ! is_old $x $hour; then echo $x; fi; done; }
# uv's own cache: environments are hard links to what is in it
uvs() {
  for p in "$c"/packages/*/uv uv "$HOME"/.local/bin/uv "$HOME"/.cargo/bin/uv; do
    command -v "$p" >/dev/null 2>&1 && "$p" --version >/dev/null 2>&1 && return
  done
  return 1
}
prune() { UV_CACHE_DIR=$c/uv UV_NO_CONFIG=1 "$p" cache prune -q --ci >/dev/null 2>&1; }
size() { z=0; for y in $(cd "$c" && du -sk envs uv 2>/dev/null); do case $y in *[!0-9]*) ;; *) z=$((z+y)); esac; done; }
making() { enter envs && test -n "$(here \( -name '.in-*' -o -name '.lock-*' \) ! -mmin +$hour)"; }

if enter run && h=$(uname -n) && test -n "$h" && enter "run/$h" && processes; then
  l=$(for x in $(here -name "$H*" -mmin +$day); do if is_gone $x; then echo $x; fi; done)
  take run none
fi
look
n=0 b=
if enter envs; then
  for x in $(hex); do
    if is_named $x "$E"; then test -h $x || test -h $x/.used || touch -c $x/.used; fi
  done
  l=$(for x in $(hex); do if ! in_use $x "$E" && is_old "$(used $x)" $age; then echo $x; fi; done)
  if test -n "$l"; then
    size; b=$z; y=$(take envs envs_now)
    printf '%s\n' "$y" | grep '^left'
    n=$(printf '%s\n' "$y" | sed -n 's/^gone envs \([0-9]*\) .*/\1/p'); n=${n:-0}
  fi
fi
if enter uv; then
  cd "$c"
  if making; then test $n = 0 || echo "kept uv"
  elif test -z "$(ls "$c/envs" 2>/dev/null)"; then
    cd "$c"
    if test -z "$(find uv ! -mmin +$hour 2>/dev/null | head -n 1)"; then
      test -n "$b" || { size; b=$z; }
      l=./uv; take uv none | grep '^left'
    fi
  elif test $n != 0; then
    if test "$UV_LINK_MODE" != symlink && uvs && prune; then :; else echo "kept uv"; fi
  fi
fi
if test -n "$b"; then size; echo "gone envs $n $((b-z))"; fi
if enter pythons; then
  homes
  l=$(for x in $(hex -mmin +$age; here -name uv -mmin +$age); do needed $x || echo $x; done)
  take pythons needed_now
fi
if enter packages; then l=$(hex -mmin +$age); take packages touched; fi
look
if enter bundles; then
  l=$(for x in $(hex -mmin +$age); do in_use $x "$B" || echo $x; done)
  take bundles bundles_now
fi
for f in trees blobs; do
  if enter $f; then
    l=$(hex -mmin +$age)
    # what a living pool uses is younger than the pool
    test -z "$U" || l=
    test -z "$O" || l=$(for x in $l; do if test -h $x || test $x -ot "$O"; then echo $x; fi; done)
    take $f touched
  fi
done
if enter runs; then
  l=$(for x in $(hex); do
    if alive $x; then continue; fi
    if test -e $x/fetched; then if is_old $x/fetched $day; then echo $x; fi
    elif is_old $x/status $age; then echo $x; fi; done)
  take runs none
fi
if enter files; then
  l=$(for x in $(here -type d ! -name '.*'); do
    is_used $x || test -n "$(find $x ! -mmin +$age 2>/dev/null | head -n 1)" || echo $x; done)
  w=$(for x in $l; do y=$(du -sk $x); echo "${x#./} ${y%%[!0-9]*}"; done)
  take files files_now
  printf '%s\n' "$w" | while read -r x y; do test -z "$x" || test -e "$x" || echo "took $x $y"; done
fi
if enter logs; then
  l=$(for x in $(here -name "$H*" -mmin +$age); do
    set -- "$c"/run/*/${x#./}
    test -e "$1" || test -n "$(find $x ! -mmin +$age 2>/dev/null | head -n 1)" || echo $x; done)
  take logs none
fi
for f in envs packages pythons bundles trees blobs files logs "run/$(uname -n)"; do
  if enter "$f"; then
    l=$(here \( -name '.in-*' -o -name ".$H-*" -o -name "$H*.$H*" \) -mmin +$day)
    take drafts touched
  fi
done
if enter .; then
  l=$(here -name 'probe.*' ! -name 'probe.*[!0-9]*' -type f -mmin +$day; here -name '.in-gc-*' -mmin +$day)
  take drafts touched
fi
if enter envs; then
  for x in $(here -name '.lock-*' -type f -size 0 -mmin +$hour); do
    y=${x#./.lock-}; test -e $y || test -n "$(here -name ".in-$y-*")" || rm -f $x
  done
fi
exit 0
"""

_CONNECT: Final = (
    "import errno,os,socket,sys;os.chdir(sys.argv[1]);s=socket.socket(socket.AF_UNIX);s.settimeout(5);"
    "sys.exit(8 if s.connect_ex('agent.sock') in (errno.ECONNREFUSED,errno.ENOENT) else 9)"
)
"""Exit status 8: no process listens on the socket."""
_SCRIPT: Final = re.sub(r"^ +|^ *#.*\n", "", (ALIVE + _BODY).strip(), flags=re.MULTILINE)


@dataclass(slots=True)
class Swept:
    """What was deleted: how many entries of each kind, and their size."""

    counts: dict[str, int] = field(default_factory=dict)
    size: int = 0
    """Bytes."""
    folders: list[tuple[str, int]] = field(default_factory=list)
    """The deleted working folders: names and bytes."""
    kept_uv: bool = False
    """Whether uv's cache still has the files of deleted environments."""

    def add(self, kind: str, count: int, size: int) -> None:
        self.counts[kind] = self.counts.get(kind, 0) + count
        self.size += max(0, size)

    def __str__(self) -> str:
        things = [_counted(count, _WORDS[kind]) for kind, count in self.counts.items() if count]
        if not things and not self.size:
            return "nothing to remove"
        said = f"removed {', '.join(things) or 'what uv kept'}: {_megabytes(self.size)}"
        if self.folders:
            said += f" ({', '.join(f'{name} {_megabytes(size)}' for name, size in self.folders)})"
        return f"{said}; uv's cache stays, where environments share its files" if self.kept_uv else said


def _megabytes(size: int) -> str:
    """
    >>> _megabytes(1_240_000)
    '1.2 MB'
    """
    number = size / 1e6
    return f"{number:.{0 if number >= 10 else 1}f} MB"


def _counted(count: int, word: str) -> str:
    """
    >>> _counted(2, "log")
    '2 logs'
    """
    return f"{count} {word}{'' if count == 1 else 's'}"


def _minutes(days: int) -> int:
    """Converts days to minutes; at least an hour, so that what was used in the last hour is always kept."""
    return max(min(days, _AGES) * _DAY, _HOUR)


def script(days: int) -> str:
    """The script, for a shell that has the cache folder's full path in ``c`` and the marker in ``m``."""
    names = f"age={_minutes(days)} day={_DAY} hour={_HOUR} H={quote(_HEX)} P={quote(_CONNECT)} e='\n'"
    return f"{names}\n{_SCRIPT}"


def sweep(shell: Shell, days: int) -> Swept:
    """Deletes from a host's cache what was not used for so many days. Raises HostUnfit if some cannot be deleted."""
    try:
        said = shell.run(script(days))
    except ScriptFailed as failed:
        said = f"left {failed.output.strip() or f'a script ended with {failed.status}'}"
    swept, left = Swept(), ""
    for line in said.splitlines():
        word, _, rest = line.partition(" ")
        found = re.fullmatch(r"(\w+) (\d{1,12}) (-?\d{1,15})", rest)
        if word == "gone" and found and found[1] in _WORDS:
            swept.add(found[1], int(found[2]), int(found[3]) * 1024)
        elif word == "took" and (gone := re.fullmatch(r"([\w.-]{1,100}) (\d{1,12})", rest, re.ASCII)):
            swept.folders.append((gone[1], int(gone[2]) * 1024))
        elif line == "kept uv":
            swept.kept_uv = True
        elif word == "left":
            left = left or rest[-400:]
    if left:
        hint = "remove it as the user that it belongs to"
        raise HostUnfit(f"{swept}; some of its cache cannot be removed: {left}", host=shell.host.name, hint=hint)
    return swept


# ---- the cache of this machine


def sweep_here(days: int) -> Swept:
    """Deletes wheels, locks and tools that this machine stores for hosts and that were not read for so many days.

    Raises UsageError if some cannot be deleted.
    """
    swept = Swept()
    now = time.time()
    for kind in ("wheels", "locks", "tools", "pythons", "hosts", "busy"):
        for path in _entries(home() / kind):
            half = path.name.startswith(".")
            if kind == "pythons" and not path.name.startswith(("cpython-", ".new-")):
                continue  # belongs to this machine's role as a host
            if now - _last_used(path) > 60 * (_DAY if half else _minutes(days)):
                size = _size(path)
                _remove(path)
                if kind != "busy":
                    swept.add("drafts" if half else kind, 1, size)
    return swept


def _entries(folder: Path) -> list[Path]:
    """The entries of a folder, unless it is a link."""
    try:
        return [] if folder.is_symlink() else sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _all(path: Path) -> Iterator[os.stat_result]:
    """The path and everything below it, without following links."""
    try:
        found = path.lstat()
        yield found
        for inner in path.iterdir() if stat.S_ISDIR(found.st_mode) else ():
            yield from _all(inner)
    except FileNotFoundError:
        pass


def _last_used(path: Path) -> float:
    """When it was last written or read. For folders only writes count: scanning them, as here, counts as a read."""
    times = (max(s.st_mtime, 0 if stat.S_ISDIR(s.st_mode) else s.st_atime) for s in _all(path))
    return max(times, default=0.0)


def _size(path: Path) -> int:
    return sum(found.st_size for found in _all(path) if not stat.S_ISDIR(found.st_mode))


def _remove(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:
        pass  # another process has deleted it
    except OSError as error:
        raise UsageError(f"{error.filename or path} cannot be removed: {error.strerror}") from None
