# shellcheck shell=sh
# Builds an environment, unless another process was faster. Prints what uv says.
#
# Given by env/install.py:
#   digest    the environment's name
#   session   the name of the session
#   uv        full path of uv, or its path below packages/
#   python    full path of an interpreter, or a version that uv finds or downloads
#   lock      path of the pylock.toml below packages/
#   offline   1: uv may download nothing; empty: it may
#   $@        packages to delete from uv's cache first
# Given by session/bootstrap.sh:
#   c         full path of the cache folder
: "${c?}" "${digest?}" "${session?}" "${uv?}" "${python?}" "${lock?}" "${offline?}"
case $uv in /*) ;; *) uv=$c/packages/$uv;; esac
# It came by a relay, whose worker has the file mapped for writing: the system runs only a copy.
test -x "$uv" || { cp "$uv" "$uv-$session" && chmod u+x "$uv-$session" && mv "$uv-$session" "$uv"; } || exit 1
n=$(uname -n | tr -cd 'A-Za-z0-9.-')
e=$c/envs/$digest t=$c/envs/.in-$digest-$n-$session
mkdir -p "$c/envs" || exit 1
f=
if command -v flock >/dev/null; then
  exec 9>"$c/envs/.lock-$digest" || exit 1
  flock 9 2>/dev/null && f=1
fi
if test -x "$e/bin/python" && test -f "$e/.ready"; then exit 0; fi
# of those that were killed here: locks may not reach another host that shares this folder
if test -n "$f"; then for p in "$c"/envs/.in-"$digest"-"$n"-*; do rm -rf "$p"; done; fi
rm -rf "$e"
trap 'rm -rf "$t"' EXIT
unset VIRTUAL_ENV CONDA_PREFIX PYTHONPATH PYTHONHOME
export UV_CACHE_DIR="$c/uv" UV_PYTHON_INSTALL_DIR="$c/pythons/uv" UV_NO_CONFIG=1 UV_NO_PROGRESS=1
if test -n "$offline"; then
  export UV_PYTHON_DOWNLOADS=never UV_OFFLINE=1
else
  export UV_PYTHON_DOWNLOADS=automatic
fi
if test $# != 0; then "$uv" cache clean -q "$@" || exit 1; fi
"$uv" venv -q --relocatable --no-project --python "$python" "$t" || exit 1
"$uv" pip sync -q --python "$t/bin/python" "$c/packages/$lock" || exit 1
: >"$t/.ready"
: >"$t/.used"
"$t/bin/python" -I -S -c 'import os, sys; os.rename(*sys.argv[1:])' "$t" "$e" || test -f "$e/.ready"
