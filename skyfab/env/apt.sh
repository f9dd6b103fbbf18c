# shellcheck shell=sh
# Installs the Debian packages that are missing. Where that is not possible, prints their names and exits with 3 if
# there is no apt-get, with 4 if the user may not use it.
#
# Given by env/install.py: the packages as $@, each as apt-get takes it: NAME or NAME=VERSION, which may contain *.
n=
for p; do
  case $p in *=*) v=${p#*=};; *) v='*';; esac
  # shellcheck disable=SC2254 # the version is a pattern
  case $(dpkg-query -W -f '${Status} ${Version}' "${p%%=*}" 2>/dev/null) in
    *"ok installed "$v) ;;
    *) n="$n $p";;
  esac
done
test -n "$n" || exit 0
command -v apt-get >/dev/null || { echo "$n"; exit 3; }
s=
if test "$(id -u)" != 0; then
  sudo -n true 2>/dev/null || { echo "$n"; exit 4; }
  s="sudo -n"
fi
export DEBIAN_FRONTEND=noninteractive
a="$s apt-get -qq -o DPkg::Lock::Timeout=120"
i="$a install -y --no-install-recommends"
# shellcheck disable=SC2086 # a word for each package
$i $n >/dev/null 2>&1 || { $a update >/dev/null 2>&1; $i $n || exit 1; }
