# shellcheck shell=sh
# Unpacks an interpreter from its archive, unless it is there already. Its last line is the interpreter's path.
#
# Given by env/install.py: digest, the archive's sha256; archive, its path below packages/. By session/bootstrap.sh: c,
# full path of the cache folder.
: "${c?}" "${digest?}" "${archive?}"
h=$c/pythons/$digest t=$c/pythons/.in-$digest-$(uname -n)-$$
# for gc: it is in use
touch -c "$h"
if ! test -d "$h"; then
  trap 'rm -rf "$t"' EXIT
  mkdir -p "$t" && tar xzf "$c/packages/$archive" -C "$t" || exit 1
  # into a folder that another host has made meanwhile, mv would put it
  test -d "$h" || mv "$t" "$h" 2>/dev/null || test -d "$h" || exit 1
fi
for p in "$h"/*/bin/python3; do echo "$p"; done
