# shellcheck shell=dash
# Deletes from a host's cache folder what was not used for a while. Prints lines that env/gc.py reads:
#   gone KIND COUNT KILOBYTES   what was deleted
#   took NAME KILOBYTES         a working folder that was deleted
#   kept uv                     uv's cache still has the files of deleted environments
#   left WHY                    something cannot be deleted
#
# Given by env/gc.py:
#   age, day, hour   in minutes: how old what goes is; a day and an hour
#   dry              1: only says what would go
#   P                a Python program (gc_connect.py): tries to connect to an agent
#   alive            detached/alive.sh, before this script
# Given by session/bootstrap.sh:
#   c                full path of the cache folder
#   m                the marker of replies; it contains the session's name
#
# Variables: e a newline, H the first digits of a digest, t where entries are moved aside, l what is to be deleted, one
# name per line. All names that are handled consist of letters, digits, dots and dashes.
#
# shellcheck disable=SC2317 # reached: `take` calls functions by their names
: "${c?}${m?}${age?}${day?}${hour?}${P?}${dry?}"
LC_ALL=C; export LC_ALL; umask 077
e='
'
H='[0-9a-f][0-9a-f][0-9a-f][0-9a-f]'; H=$H$H$H$H
# a folder that cannot be written to cannot be moved
# shellcheck disable=SC2016 # for the shell that xargs starts
M='for x; do test -h "$x" || test ! -d "$x" || test -w "$x" || chmod u+rwx "$x"; done 2>/dev/null; mv -f "$@" "$0"'
s=${m#=skyfab=}; s=${s%=}; t=.in-gc-$s
test -n "$s" && test -d "$c" || exit 0
# enter FOLDER: goes there, unless it is a link
# shellcheck disable=SC2164 # its status is the function's
enter() { test ! -h "$c/${1%%/*}" && test ! -h "$c/$1" && test -d "$c/$1" && cd "$c/$1"; }
# here TESTS: the names in this folder that pass; hex TESTS: those that are digests
here() { find . ! -name . -prune ! -name '*[!A-Za-z0-9_.-]*' "$@" 2>/dev/null; }
hex() { here -name "$H*" ! -name '*[!0-9a-f]*' "$@"; }
is_old() { test -n "$(find "$1" -prune -mmin +"$2" 2>/dev/null)"; }
# take KIND BACK: moves what $l names aside; what BACK names has been used meanwhile; the rest goes
take() {
  q=0
  if test "$dry" = 1; then tell "$1"; return 0; fi
  # a full disk has no room for a folder: the first to go makes it
  while test -n "$l" && ! y=$(mkdir "$t" 2>&1); do
    case $y in *space*|*uota*) ;; *) echo "left $y"; return 0;; esac
    rm -rf "${l%%"$e"*}" && q=$((q+1))
    case $l in *"$e"*) l=${l#*"$e"};; *) l=; esac
  done
  if test -z "$l"; then test $q = 0 || echo "gone $1 $q 0"; return 0; fi
  y=$(printf '%s\n' "$l" | xargs -n 100 sh -c "$M" "$t" 2>&1 | grep -v 'No such file' | head -n 1)
  test -z "$y" || echo "left $y"
  cd "$t" || return 0
  for x in $($2); do mv "$x" .. 2>/dev/null; done
  # shellcheck disable=SC2012 # names without newlines, and only counted
  k=$(ls -A | wc -l); k=$((k+q)); z=$(du -sk .); cd ..
  rid "$t" && test $k != 0 && echo "gone $1 $k ${z%%[!0-9]*}"
}
tell() {
  test -n "$l" || return 0
  k=0 z=0
  for x in $l; do y=$(du -sk "$x" 2>/dev/null); y=${y%%[!0-9]*}; k=$((k+1)) z=$((z+${y:-0})); done
  echo "gone $1 $k $z"
}
rid() {
  rm -rf "$1" 2>/dev/null && return
  find "$1" -type d -exec chmod u+rwx {} \; 2>/dev/null
  y=$(rm -rf "$1" 2>&1) || { echo "left ${y##*"$e"}"; return 1; }
}
none() { :; }
touched() { here ! -mmin +"$hour"; }

# what living pools use: E environments, B bundles, O the oldest note, U one that has not said yet
look() {
  E=; B=; O=; U=
  for x in "$c"/run/*/*; do
    test -d "$x" || continue
    y=; n=$x/bundle
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
needed_now() { homes; for x in $(here); do if needed "$x" || ! is_old "$x" "$hour"; then echo "$x"; fi; done; }
# environments: a link counts by itself
used() { if test ! -h "$1" && test -e "$1/.used"; then echo "$1/.used"; else echo "$1"; fi; }
is_named() { case $2 in *" ${1#./} "*) return 0;; esac; return 1; }
in_use() { test -n "$U" || is_named "$@"; }
envs_now() {
  look
  for x in $(here); do if in_use "$x" "$E" || ! is_old "$(used "$x")" "$hour"; then echo "$x"; fi; done
}
bundles_now() { look; for x in $(here); do if in_use "$x" "$B" || ! is_old "$x" "$hour"; then echo "$x"; fi; done; }
# working folders: a living pool has noted which it uses
is_used() { grep -qsxF -e "${1#./}" "$c"/run/*/*/files; }
files_now() { for x in $(here); do if is_used "$x" || ! is_old "$x" "$hour"; then echo "$x"; fi; done; }
# uv's own cache: environments are hard links to what is in it
uvs() {
  for p in "$c"/packages/*/uv uv "$HOME"/.local/bin/uv "$HOME"/.cargo/bin/uv; do
    command -v "$p" >/dev/null 2>&1 && "$p" --version >/dev/null 2>&1 && return
  done
  return 1
}
prune() { UV_CACHE_DIR=$c/uv UV_NO_CONFIG=1 "$p" cache prune -q --ci >/dev/null 2>&1; }
size() { z=0; for y in $(cd "$c" && du -sk envs uv 2>/dev/null); do case $y in *[!0-9]*) ;; *) z=$((z+y)); esac; done; }
making() { enter envs && test -n "$(here \( -name '.in-*' -o -name '.lock-*' \) ! -mmin +"$hour")"; }

if enter run && h=$(uname -n) && test -n "$h" && enter "run/$h" && processes; then
  l=$(for x in $(here -name "$H*" -mmin +"$day"); do if is_gone "$x"; then echo "$x"; fi; done)
  take run none
fi
look
n=0 b=
if enter envs; then
  for x in $(hex); do
    if test "$dry" != 1 && is_named "$x" "$E"; then
      test -h "$x" || test -h "$x/.used" || touch -c "$x/.used"
    fi
  done
  l=$(for x in $(hex); do if ! in_use "$x" "$E" && is_old "$(used "$x")" "$age"; then echo "$x"; fi; done)
  if test "$dry" = 1; then take envs none
  elif test -n "$l"; then
    size; b=$z; y=$(take envs envs_now)
    printf '%s\n' "$y" | grep '^left'
    n=$(printf '%s\n' "$y" | sed -n 's/^gone envs \([0-9]*\) .*/\1/p'); n=${n:-0}
  fi
fi
if test "$dry" != 1 && enter uv; then
  enter .
  if making; then test "$n" = 0 || echo "kept uv"
  elif test -z "$(ls "$c/envs" 2>/dev/null)"; then
    enter .
    if test -z "$(find uv ! -mmin +"$hour" 2>/dev/null | head -n 1)"; then
      test -n "$b" || { size; b=$z; }
      l=./uv; take uv none | grep '^left'
    fi
  elif test "$n" != 0; then
    if test "$UV_LINK_MODE" != symlink && uvs && prune; then :; else echo "kept uv"; fi
  fi
fi
if test -n "$b"; then size; echo "gone envs $n $((b-z))"; fi
if enter pythons; then
  homes
  l=$(for x in $(hex -mmin +"$age"; here -name uv -mmin +"$age"); do needed "$x" || echo "$x"; done)
  take pythons needed_now
fi
if enter packages; then l=$(hex -mmin +"$age"); take packages touched; fi
look
if enter bundles; then
  l=$(for x in $(hex -mmin +"$age"); do in_use "$x" "$B" || echo "$x"; done)
  take bundles bundles_now
fi
for f in trees blobs; do
  if enter $f; then
    l=$(hex -mmin +"$age")
    # what a living pool uses is younger than the pool
    test -z "$U" || l=
    test -z "$O" || l=$(for x in $l; do if test -h "$x" || test "$x" -ot "$O"; then echo "$x"; fi; done)
    take $f touched
  fi
done
if enter runs; then
  l=$(for x in $(hex); do
    if alive "$x"; then continue; fi
    if test -e "$x/fetched"; then if is_old "$x/fetched" "$day"; then echo "$x"; fi
    elif is_old "$x/status" "$age"; then echo "$x"; fi; done)
  take runs none
fi
if enter files; then
  l=$(for x in $(here -type d ! -name '.*'); do
    is_used "$x" || test -n "$(find "$x" ! -mmin +"$age" 2>/dev/null | head -n 1)" || echo "$x"; done)
  w=$(for x in $l; do y=$(du -sk "$x"); echo "${x#./} ${y%%[!0-9]*}"; done)
  take files files_now
  printf '%s\n' "$w" | while read -r x y; do test -z "$x" || { test "$dry" != 1 && test -e "$x"; } || echo "took $x $y"; done
fi
if enter logs; then
  l=$(for x in $(here -name "$H*" -mmin +"$age"); do
    set -- "$c"/run/*/"${x#./}"
    test -e "$1" || test -n "$(find "$x" ! -mmin +"$age" 2>/dev/null | head -n 1)" || echo "$x"; done)
  take logs none
fi
for f in envs packages pythons bundles trees blobs files logs "run/$(uname -n)"; do
  if enter "$f"; then
    l=$(here \( -name '.in-*' -o -name ".$H-*" -o -name "$H*.$H*" \) -mmin +"$day")
    take drafts touched
  fi
done
if enter .; then
  l=$(here -name 'probe.*' ! -name 'probe.*[!0-9]*' -type f -mmin +"$day"; here -name '.in-gc-*' -mmin +"$day")
  take drafts touched
fi
if test "$dry" != 1 && enter envs; then
  for x in $(here -name '.lock-*' -type f -size 0 -mmin +"$hour"); do
    y=${x#./.lock-}; test -e "$y" || test -n "$(here -name ".in-$y-*")" || rm -f "$x"
  done
fi
exit 0

