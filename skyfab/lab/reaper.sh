# shellcheck shell=sh
# Waits until stdin is at its end, when the owner of a lab has exited, and takes the lab down if it is still the owner's.
#
# Given by lab/lab.py: $0 an interpreter, $1 the folder of the lab, $2 the content of its owner.pid, $3 where skyfab is.
cat >/dev/null
[ "$(cat "$1/owner.pid" 2>/dev/null)" = "$2" ] || exit 0
PYTHONPATH=$3 exec "$0" -c 'import sys; from skyfab.lab.lab import take_down; take_down(sys.argv[1])' "$1"
