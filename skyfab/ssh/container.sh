# shellcheck shell=dash
# Runs a command in a container of the host, with the first program that can.
#
# Given by ssh/container.py as arguments: $1 the programs, podman docker or apptainer singularity; $2 the container or
# image, as printf %b reads it; then the command. Exits with its status, or with 70 if it cannot run: the last line of
# stderr is WHY|WHAT TO TYPE, or what the program said. As in session/bootstrap.sh, there is no single quote,
# exclamation mark or backslash outside of comments.
PATH=$PATH:/usr/local/bin:/usr/bin:/bin
l=$1 w=
n=$(printf %bx "$2")
n=${n%x}
shift 2
# shellcheck disable=SC2088 # the tilde itself is meant
test "${n#"~/"}" = "$n" || n=$HOME/${n#"~/"}
test -t 0 && t=-t || t=
test -e /dev/nvidiactl && g=--nv || g=
# 255 would mean that ssh has failed
run() { "$@" || exit $(($? == 255 ? 70 : $?)); exit; }
for e in $l; do
  command -v "$e" >/dev/null || continue
  test "$l" = "podman docker" || run "$e" -q exec ${g:+"$g"} "$n" "$@"
  s=$("$e" container inspect --format "{{.State.Running}}" "$n" 2>&1)
  case $s in
    *true) run "$e" exec -i ${t:+"$t"} "$n" "$@";;
    *false) w="its container $n is not running|$e start $n";;
    *"o such container"*) w=${w:-"it has no container $n|$e ps --all"};;
    *) test "${w%" is not running|"*}" = "$w" && w="$e does not work: $(echo "$s" | tail -n 1)|$e ps";;
  esac
done
echo "${w:-"it has neither ${l% *} nor ${l#* }, or not on the PATH of its login shell|command -v $l"}" >&2
exit 70
