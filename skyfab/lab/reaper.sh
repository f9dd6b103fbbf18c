# shellcheck shell=sh
# Waits until stdin is at its end, when the owner of a lab has exited, and takes the lab down.
#
# Given by lab/reaper.py: $0 an interpreter, $1 the folder of the lab.
read -r _
exec "$0" -c 'import sys; from skyfab.lab.lab import take_down; take_down(sys.argv[1])' "$1"
