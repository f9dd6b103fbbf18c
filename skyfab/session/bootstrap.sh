# shellcheck shell=dash
# The first command on a host: starts the link, or says what is missing for that; then runs the scripts that it is sent.
#
# Given by session/bootstrap.py as arguments: $1 the cache folder and $2 the interpreter (a path, env/DIGEST/BOOT, a
# version, any or none), both as printf %b reads them; $3 the bundle; $4 the session; $5 start, resume or ask.
# Prints a marked line: python, bundle, nopython or failed WHY. After python and bundle the interpreter reads stdin; after
# python, it says link, or bundle if that is damaged.
#
# session/bootstrap.py joins the lines and puts them between single quotes for any login shell: outside of comments
# there is no single quote, exclamation mark or backslash.
SKYFAB_UMASK=$(umask)
export SKYFAB_UMASK
umask 077
# space for a number, see host/agent/zygote.py
SKYFAB_FORKED=0000000000
export SKYFAB_FORKED
d() { printf %bx "$1"; }
c=$(d "$1")
c=${c%x}
p=$(d "$2")
p=${p%x}
d=$3 i=$4 k=$5
# in two parts: the text of this command does not look like a reply
m="=sky""fab=$i="
# shellcheck disable=SC2088 # the tilde itself is meant
case $c in
  /*) ;;
  "~") c=$HOME;;
  "~/"*) c=$HOME/${c#"~/"};;
  *) c=$HOME/$c;;
esac
# A user who can write there could have put a bundle of their own into it. Create it before the check: otherwise another
# user could create it between the check and its use.
test -d "$c" || mkdir -p "$c" 2>/dev/null
if test -e "$c"; then
  case $(ls -ldL "$c") in
    ?????w*|????????w*) r="is writable by others";;
    *) test -O "$c" && r= || r="belongs to another user";;
  esac
  # The owner of a link can make it lead elsewhere at any time, and who can write to a folder can replace what is in it.
  # Above the home folder none is checked: a user who can replace that controls the account anyway.
  h=$HOME/
  for q in "${c%/}" "$(cd -P "$c" 2>/dev/null && pwd -P)"; do
    while test -n "$q" && test "${h#"$q"/}" = "$h"; do
      # shellcheck disable=SC2046 # the words of ls
      test -L "$q" && set -- $(ls -ldn "$q") && case $3 in
        0|"$(id -u)") ;;
        *) r="is reached through a link of another user";;
      esac
      # shellcheck disable=SC2046 # the words of ls
      set -- $(ls -ldnL "$q")
      case $1 in
        ????????w[tT]*) ;;
        ????????w*) r="is in $q, which is writable by others";;
      esac
      case $3 in
        0|"$(id -u)") ;;
        *) r="is in $q, which belongs to another user";;
      esac
      q=${q%/*}
    done
  done
  test -z "$r" || {
    echo "${m}failed its cache folder $r: $c"
    exit
  }
fi
# The requested interpreter: a path, an environment (only if the machine has not rebooted since it was chosen), or a
# version.
case $p in
  /*) ;;
  none) p=;;
  any)
    for q in python3 python3.14 python3.13 python3.12 python3.11 python3.10 "$c"/envs/*/bin/python "$c"/pythons/*/*/bin/python3; do
      p=$(command -v "$q") && "$p" -Sc "import sys;sys.exit(sys.version_info<(3,10))" && break
      p=
    done
    ;;
  env/*)
    p=${p#env/}
    r=${p#*/}
    e=$c/envs/${p%%/*}
    p=
    read -r o </proc/sys/kernel/random/boot_id && test "$o" = "$r" && p=$e/bin/python && true >"$e/.used"
    ;;
  *)
    v=$p
    p=$(command -v "python$v") || for q in python3 python; do
      p=$(command -v $q) &&
        test "$("$p" -Sc "import sys;print(*sys.version_info[:2],sep=chr(46))")" = "$v" && break
      p=
    done
    ;;
esac 2>/dev/null
# Becomes the interpreter in p, which runs the bundle, or else reads a program (session/unpack.py) that is sent to it.
go() {
  b=$c/bundles/$d
  if test -s "$b/__main__.py" && test -O "$b/__main__.py"; then
    echo "${m}python"
    exec "$p" -S "$b" "$c" "$i" "$k"
  fi
  echo "${m}bundle"
  # without the current folder, in which others may have put modules
  u="import sys;sys.path=[q for q in sys.path if q];sys.version_info<(3,10) and sys.exit(sys.version.split()[0])"
  exec "$p" -S -c "$u;f=sys.stdin.buffer;exec(f.read(int(f.readline())))" "$c" "$d" "$i" "$k"
}
test -f "$p" && test -x "$p" && go
echo "${m}nopython"
# Runs what session/shell.py sends: a line with the length of a script, and the script. One that has input is read byte
# by byte: reading more than its length would consume part of its input.
PATH=$PATH:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin
while read -r n r; do
  case $r in
    fed) s=$(dd bs=1 count="$n" 2>/dev/null);;
    *) s=$(head -c "$n");;
  esac
  eval "$s"
done
