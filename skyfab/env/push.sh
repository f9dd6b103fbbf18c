# shellcheck shell=sh
# Unpacks packages from the tar archive on its standard input. The folder of a package may be there already, with its
# content under another name.
#
# Given by env/install.py: session, the name of the session. By session/bootstrap.sh: c, full path of the cache folder.
: "${c?}" "${session?}"
t=$c/packages/.in-$session
trap 'rm -rf "$t"' EXIT
mkdir -p "$t" && cd "$t" && tar xmf - || exit 1
for p in *; do { ! test -d "../$p" && mv "$p" ..; } || mv -f "$p"/* "../$p/" || exit 1; done
