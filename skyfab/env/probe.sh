# shellcheck shell=dash
# Finds out what a host is, or which indexes it reaches, and prints one fact in each line: a word and a value.
# env/probe.py sends it and reads that.
#
# Given by env/probe.py:
#   P      a Python program (probe_python.py): prints the version and the real path of the interpreter that runs it
#   A      a Python program (probe_index.py): sends a request to an index
#   w      the interpreter that sends requests where there is no curl; may be empty
#   $@     the indexes to send requests to: then it finds out nothing else
# Given by session/bootstrap.sh:
#   c      full path of the cache folder
#
# Variables: T set if there is `timeout`, d a folder. Jobs run in parallel: they write whole short lines into one pipe;
# `end` ends the reading even if a killed wrapper's child still holds the pipe open.
: "${c?}${P?}${A?}${w?}"
LC_ALL=C; export LC_ALL
e='
'
o() { printf '%s %s\n' "$1" "${2%%"$e"*}"; }
# t SECONDS COMMAND, in a subshell only: becomes the command, with a limit where `timeout` is there to set one
t() { n=$1; shift; if [ "$T" ]; then exec timeout -s KILL "$n" "$@"; else exec "$@"; fi; }
# watch SECONDS PIDS sets it for all of them elsewhere; settle waits for them
watch() {
  n=$1; shift; j=$*; g=
  [ "$T" ] || [ -z "$j" ] && return
  # shellcheck disable=SC2086 # process ids: a word for each
  ( trap 'kill $!; exit 0' TERM; sleep "$n" & wait $!; kill -9 $j ) >/dev/null & g=$!
}
settle() {
  for p in $j; do wait "$p"; done
  [ -z "$g" ] || { kill "$g"; wait "$g"; }
}
# calls search for each folder, which is in d
search_all() {
  i=$IFS; IFS=:; set -f
  # shellcheck disable=SC2086 # a word for each folder
  set -- $PATH
  set +f; IFS=$i
  for d in "$@" /usr/bin /usr/local/bin /opt/*/bin "$HOME"/.local/bin "$HOME"/.pyenv/versions/*/bin \
    "$HOME"/miniconda3/bin "$HOME"/anaconda3/bin "$HOME"/miniforge3/bin "$HOME"/.cargo/bin \
    /usr/local/nvidia/bin /usr/lib/wsl/lib
  do case $d in *"$e"*|*/.pyenv/shims) ;; /*) search;; esac; done
}
known() {
  i=$IFS; IFS=$e; set -f; r=1
  for q in $S; do [ "$q" = "$p" ] || [ "$q" -ef "$p" ] && { r=0; break; }; done
  set +f; IFS=$i; return $r
}
search() {
  [ "$U" ] || { [ -f "$d/uv" ] && [ -x "$d/uv" ] && U=$d/uv; }
  [ "$nv$N" ] || { [ -f "$d/nvidia-smi" ] && [ -x "$d/nvidia-smi" ] && N=$d/nvidia-smi; }
  # without its developer tools, macOS answers for its own python3 with a window
  case $s$d in Darwin/usr/bin) xcode-select -p >/dev/null || return;; esac
  for n in python3 python python3.10 python3.11 python3.12 python3.13 python3.14 python3.15; do
    p=$d/$n
    { [ -f "$p" ] && [ -x "$p" ] && [ "$x" -lt 32 ] && ! known; } || continue
    S=$S$p$e; x=$((x+1)); t 5 "$p" -I -S -B -c "$P" $x "$p" & J="$J $!"
  done
}
uv() { y=$(t 5 "$U" --version) || exit; y=${y#uv }; o uv "${y%% *} $U"; }
# where the kernel does not say which driver it has, as on WSL
smi() { y=$(t 10 "$N" --query-gpu=driver_version --format=csv,noheader) || exit; o driver "$y"; }
libc() {
  y=$(getconf GNU_LIBC_VERSION) || y=
  [ "$y" ] || y=$(ldd --version 2>&1)
  case $y in *[0-9].[0-9]*) ;; *)
    for f in /lib/ld-musl-"$m"*.so.1 /lib/ld-musl-*.so.1; do [ -x "$f" ] && { y=$("$f" 2>&1); break; }; done
  esac
  z=${y#*"$e"}; o libc "${y%%"$e"*} ${z%%"$e"*}"
}
look() {
  S=; J=; U=; N=; x=0
  y=$(uname -sm); s=${y%% *}; m=${y##* }
  search_all
  [ "$U" ] && { uv & J="$J $!"; }
  [ "$N" ] && { smi & J="$J $!"; }
  # shellcheck disable=SC2086 # process ids: a word for each
  watch 5 $J
  # a kernel of 64 bits below programs of 32
  case $(getconf LONG_BIT)$m in 32x86_64) m=i686;; 32aarch64) m=armv7l;; esac
  o system "$s"; o arch "$m"; libc
  y=; read -r y </opt/rocm/.info/version; o rocm "$y"
  settle; echo end
}
# not inside $( ): macOS's sh does not read `case` there
keep() {
  while IFS= read -r l; do
    case $l in
    end) break;;
    python\ *|uv\ *|driver\ *|rocm\ *|system\ *|arch\ *|libc\ *) printf '%s\n' "$l";;
    esac
  done
}
# ask URL, in a subshell only
ask() {
  case $w in
  curl) y=$(curl -q -gsI -o /dev/null -w '%{http_code}' --connect-timeout 2 -m 3 --url "$1")
    case $y in *[1-9]*) o index "$1"; esac;;
  *) (t 3 "$w" -I -S -B -c "$A" "$1") && o index "$1";;
  esac
}
# shellcheck disable=SC2086 # process ids: a word for each
asks() { J=; for y do ask "$y" & J="$J $!"; done; watch 3 $J; }
disk() {
  p=$c; while [ ! -e "$p" ]; do case $p in */*) p=${p%/*}; p=${p:-/};; *) p=.; esac; done
  y=$(df -Pk "$p"); y=${y##*"$e"}; o disk "$y"
  o mount "$(findmnt -no OPTIONS -T "$p")"
}
{
  boot=; nv=; T=; J=; j=; g=
  timeout 1 true && T=1
  command -v curl >/dev/null && w=curl
  if [ $# != 0 ]; then [ "$w" ] && { asks "$@"; settle; }; exit; fi
  [ -r /proc/sys/kernel/random/boot_id ] && read -r boot </proc/sys/kernel/random/boot_id
  [ "$boot" ] || { y=$(sysctl -n kern.boottime); y=${y#*sec = }; boot=${y%%,*}; }
  [ -r /proc/driver/nvidia/version ] && read -r nv </proc/driver/nvidia/version
  look | keep
  o cache "$c"; o boot "$boot"; o nvrm "$nv"
  disk
} </dev/null 2>/dev/null | tr -d '\000-\011\013-\037\177'
