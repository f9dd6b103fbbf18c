# shellcheck shell=dash
# Runs the setup lines of a host in a login shell, one by one, and then becomes the shell that runs bootstrap.sh: what
# the lines have exported is the environment of that, of the agent and of the workers.
#
# Given by session/bootstrap.py as arguments: $1 a newline and $2 the lines, both as printf %b reads them; $3 the text of
# bootstrap.sh, a name, and its arguments $5 to $9. Descriptor 3 is the standard input.
# Prints a marked line if a line fails: setup STATUS LINE OUTPUT, the latter two in hexadecimal.
#
# session/bootstrap.py joins the lines and puts them between single quotes for any login shell: outside of comments
# there is no single quote, exclamation mark or backslash. Files that are sourced would see arguments: there are none.
skyfab_n=$(printf %bx "$1")
skyfab_n=${skyfab_n%x}
skyfab_l=$(printf %bx "$2")
skyfab_l=${skyfab_l%x}
skyfab_3=$3 skyfab_5=$5 skyfab_6=$6 skyfab_7=$7 skyfab_8=$8 skyfab_9=$9
set --
skyfab_o=$(mktemp) || skyfab_o=/dev/null
exec 4>&1 5>&2 >"$skyfab_o" 2>&1
skyfab_hex() { od -An -v -tx1 | tr -cd 0-9a-f; }
# shellcheck disable=SC2317 # run by the trap, also if a line exits
skyfab_failed() {
  skyfab_s=$?
  set +eu
  exec >&4 2>&5
  # in two parts: the text of this command does not look like a reply
  printf %s "=sky""fab=$skyfab_8=setup $skyfab_s $(printf %s "$skyfab_1" | skyfab_hex) "
  tail -c 4000 "$skyfab_o" | skyfab_hex
  echo
  test "$skyfab_o" = /dev/null || rm -f "$skyfab_o"
}
trap skyfab_failed EXIT
while test -n "$skyfab_l"; do
  skyfab_1=${skyfab_l%%"$skyfab_n"*}
  skyfab_l=${skyfab_l#*"$skyfab_n"}
  eval "$skyfab_1" 3<&- 4>&- 5>&- || exit
done
trap - EXIT
test "$skyfab_o" = /dev/null || rm -f "$skyfab_o"
exec <&3 3<&- >&4 4>&- 2>&5 5>&-
exec /bin/sh -c "$skyfab_3" skyfab "$skyfab_5" "$skyfab_6" "$skyfab_7" "$skyfab_8" "$skyfab_9"
