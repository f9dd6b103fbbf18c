"""The probe: a shell script that collects facts about a host (system, Python, uv, GPUs, disk), and its parser.

It is plain POSIX sh and needs no Python on the host. Facts that take long to collect and rarely change are stored in
the cache folder, until the machine reboots, the script or the NVIDIA driver changes, or a searched folder has changed.
Nothing is stored for a host without Python, or if a command timed out.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from .facts import Facts, Gpu, Program

_PYTHON: Final = (
    "import sys,posix;v=sys.version_info;q='%s/bin/python%d.%d'%(sys.base_prefix,v[0],v[1]);"
    "q=q if posix.access(q,1) else sys.argv[2];"
    "v>=(3,10) and sys.implementation.name=='cpython' and q.isprintable() "
    "and print('python '+sys.argv[1],sys.version.split()[0],q)"
)
"""Run by each interpreter: one behind a link, a venv or a wrapper reports its real path."""

_ASK: Final = """import sys,urllib.request as r,urllib.error as e
try:r.urlopen(r.Request(sys.argv[1],method="HEAD"),timeout=2)
except e.HTTPError:pass"""

_TEXT: Final = 256 * 1024
_VALUE: Final = 4096
_MANY: Final = 64

# Variables: c cache folder, v digest of this script, k key of the stored result, R the result, T set if there is
# `timeout`, d a folder, w the program that queries the indexes. Jobs run in parallel: they write whole short lines into
# one pipe; `end` ends the reading even if a killed wrapper's child still holds the pipe open.
_BODY: Final = r"""
LC_ALL=C; export LC_ALL; umask 077
e='
'
o() { printf '%s %s\n' "$1" "${2%%$e*}"; }
# t SECONDS COMMAND, in a subshell only: becomes the command, with a limit where `timeout` is there to set one
t() { n=$1; shift; if [ "$T" ]; then exec timeout -s KILL $n "$@"; else exec "$@"; fi; }
# watch SECONDS PIDS sets it for all of them elsewhere; settle waits for them, and says if one had to be ended
watch() {
  n=$1; shift; j=$*; g=
  [ "$T" ] || [ -z "$j" ] && return
  ( trap 'kill $!; exit 0' TERM; sleep $n & wait $!; kill -9 $j ) >/dev/null & g=$!
}
settle() {
  for p in $j; do wait $p; [ $? -lt 128 ] || o late; done
  [ -z "$g" ] || { kill $g; wait $g; }
}
# each FUNCTION: calls it with every folder in d
each() {
  f=$1; i=$IFS; IFS=:; set -f; set -- $PATH; set +f; IFS=$i
  for d in "$@" /usr/bin /usr/local/bin /opt/*/bin "$HOME"/.local/bin "$HOME"/.pyenv/versions/*/bin \
    "$HOME"/miniconda3/bin "$HOME"/anaconda3/bin "$HOME"/miniforge3/bin "$HOME"/.cargo/bin \
    /usr/local/nvidia/bin /usr/lib/wsl/lib
  do case $d in *"$e"*|*/.pyenv/shims) ;; /*) $f;; esac; done
}
newer() { [ "$d" -nt "$c/probe" ] && R=; }
known() {
  i=$IFS; IFS=$e; set -f; r=1
  for q in $S; do [ "$q" = "$p" ] || [ "$q" -ef "$p" ] && { r=0; break; }; done
  set +f; IFS=$i; return $r
}
search() {
  [ "$U" ] || { [ -f "$d/uv" ] && [ -x "$d/uv" ] && U=$d/uv; }
  [ "$N" ] || { [ -f "$d/nvidia-smi" ] && [ -x "$d/nvidia-smi" ] && N=$d/nvidia-smi; }
  # without its developer tools, macOS answers for its own python3 with a window
  case $s$d in Darwin/usr/bin) xcode-select -p >/dev/null || return;; esac
  for n in python3 python python3.10 python3.11 python3.12 python3.13 python3.14 python3.15; do
    p=$d/$n
    [ -f "$p" ] && [ -x "$p" ] && [ $x -lt 32 ] && ! known || continue
    S=$S$p$e; x=$((x+1)); t 5 "$p" -I -S -B -c "$P" $x "$p" & J="$J $!"
  done
}
uv() { y=$(t 5 "$U" --version) || exit $?; y=${y#uv }; o uv "${y%% *} $U"; }
smi() {
  y=$(t 10 "$N" --query-gpu=name,memory.total,driver_version --format=csv,noheader,nounits) || exit $?
  printf '%s\n' "$y" | while IFS= read -r l; do o nvidia "$l"; done
}
libc() {
  y=$(getconf GNU_LIBC_VERSION) || y=
  [ "$y" ] || y=$(ldd --version 2>&1)
  case $y in *[0-9].[0-9]*) ;; *)
    for f in /lib/ld-musl-"$m"*.so.1 /lib/ld-musl-*.so.1; do [ -x "$f" ] && { y=$("$f" 2>&1); break; }; done
  esac
  z=${y#*$e}; o libc "${y%%$e*} ${z%%$e*}"
}
release() {
  [ "$s" = Darwin ] && o release "$(sw_vers -productName) $(sw_vers -productVersion)"
  for f in /usr/lib/os-release /etc/os-release; do
    [ -r "$f" ] && while IFS= read -r l; do case $l in PRETTY_NAME=*) o release "${l#*=}"; esac; done <"$f"
  done
}
amd() {
  y=; read -r y </opt/rocm/.info/version; o rocm "$y"
  [ -e /dev/kfd ] && for d in /sys/class/drm/card*/device; do
    y=; z=; l=; read -r y <"$d/vendor"; read -r z <"$d/mem_info_vram_total"; read -r l <"$d/product_name"
    [ "$y" = 0x1002 ] && o amd "$z $l"
  done
}
look() {
  S=; J=; U=; N=; x=0
  y=$(uname -sm); s=${y%% *}; m=${y##* }
  each search
  [ "$U" ] && { uv & J="$J $!"; }
  [ "$N" ] && { o smi; smi & J="$J $!"; }
  watch 5 $J
  # a kernel of 64 bits below programs of 32
  case $(getconf LONG_BIT)$m in 32x86_64) m=i686;; 32aarch64) m=armv7l;; esac
  o system "$s"; o arch "$m"; libc; release; amd
  for f in /proc/driver/nvidia/gpus/*/information; do
    [ -r "$f" ] && while read -r y l; do [ "$y" = Model: ] && o model "$l"; done <"$f"
  done
  settle; echo end
}
# not inside $( ): macOS's sh does not read `case` there
keep() {
  while IFS= read -r l; do
    case $l in
    end) break;;
    python\ *|uv\ *|smi\ *|nvidia\ *|model\ *|amd\ *|rocm\ *|system\ *|arch\ *|libc\ *|release\ *|late\ *)
      printf '%s\n' "$l";;
    esac
  done
}
remember() {
  case $e$R in *"${e}late"*) return;; *"${e}python "*) ;; *) return;; esac
  case $e$R in *"${e}smi"*) case $e$R in *"${e}nvidia "*) ;; *) return;; esac; esac
  [ "$boot" ] && [ ! -d "$c/probe" ] && { [ -d "$c" ] || mkdir -p "$c"; } || return
  y=$c/probe.$$; printf '%s\n%s\n' "$k" "$R" >"$y" && mv -f "$y" "$c/probe" || rm -f "$y"
}
remembered() {
  R=; [ "$boot" ] && [ -f "$c/probe" ] && [ -r "$c/probe" ] || return
  { IFS= read -r l && [ "$l" = "$k" ] && while IFS= read -r l; do
    case $l in python\ *|uv\ *) [ -x "/${l#*/}" ] || { R=; break; }; esac
    R=$R$l$e
  done; } <"$c/probe"
  [ "$R" ] && each newer
}
ask() {
  case $w in
  curl) y=$(curl -q -gsI -o /dev/null -w '%{http_code}' --connect-timeout 2 -m 3 --url "$1")
    case $y in *[1-9]*) o index "$1"; esac;;
  # busybox's may know no limits, and says in words what the other's exit code says, which takes notes in $HOME
  wget) z=; case $(wget --version 2>&1) in GNU*) z='-T 2 -t 1'; esac
    y=$(HOME=/dev/null; export HOME; t 3 wget --spider $z "$1" 2>&1)
    case $?$y in 0*|8*|*"server returned error: HTTP"*) o index "$1"; esac;;
  *) (t 3 "$w" -I -S -B -c "$A" "$1") && o index "$1";;
  esac
}
asks() { J=; for y do ask "$y" & J="$J $!"; done; watch 3 $J; }
disk() {
  p=$c; while [ ! -e "$p" ]; do case $p in */*) p=${p%/*}; p=${p:-/};; *) p=.; esac; done
  y=$(df -Pk "$p"); y=${y##*$e}; o disk "$y"
  m=${y#*%}; m=/${m#*/}
  if [ -r /proc/self/mounts ]; then
    case $m in *\ *) m=$(printf %s "$m" | sed 's/ /\\040/g'); esac
    y=$(grep -F " $m " /proc/self/mounts) || o kind "$(stat -f -c %T "$p")"
  else y=$(mount | grep -F " on $m ("); fi
  o mount "${y##*$e}"
}
boot=; nv=; T=; w=; J=; j=; g=
[ -r /proc/sys/kernel/random/boot_id ] && read -r boot </proc/sys/kernel/random/boot_id
[ "$boot" ] || { y=$(sysctl -n kern.boottime); y=${y#*sec = }; boot=${y%%,*}; }
[ -r /proc/driver/nvidia/version ] && read -r nv </proc/driver/nvidia/version
k="$v $boot $nv $HOME $PATH"
timeout 1 true && T=1
for y in curl wget; do command -v $y >/dev/null && { w=$y; break; }; done
[ "$w" ] && asks "$@"
remembered
[ "$R" ] || { R=$(look | keep); remember; }
printf '%s\n' "$R"
case $w$e$R in "$e"*"${e}python "*) w=${R#*python }; w=/${w#*/}; w=${w%%$e*}; asks "$@"; esac
case $c in *"$e"*|*[[:cntrl:]]*) o cachex "$(printf %s "$c" | od -An -v -tx1 | tr -d ' \n')";; *) o cache "$c"; esac
o boot "$boot"; o nvrm "$nv"; o shell "$SHELL"; o user "$(id -un)"
o files "$(ulimit -n)"; o processes "$(ulimit -u || ulimit -p)"
disk
settle
"""

_SCRIPT: Final = re.sub(r"^ +|^ *#.*\n", "", _BODY.strip(), flags=re.MULTILINE)
_VERSION: Final = hashlib.sha256((_PYTHON + _SCRIPT).encode()).hexdigest()[:16]


def script(indexes: Sequence[str]) -> str:
    """The script, for a shell that has the cache folder's full path in ``c``.

    It also sends a request to each of `indexes`; any response counts. Left out are those that do not begin with http,
    which are not on a network, and those with a control character, which are not URLs.
    """
    urls = [url for url in indexes if re.fullmatch(r"(?i:https?)://[^\x00-\x1f\x7f]+", url)]
    words = f"v={_VERSION}; P={shlex.quote(_PYTHON)}; A={shlex.quote(_ASK)}; set -- {shlex.join(urls)}"
    return f"{words}\n{{ {_SCRIPT}\n}} </dev/null 2>/dev/null | LC_ALL=C tr -d '\\000-\\011\\013-\\037\\177'\n"


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
