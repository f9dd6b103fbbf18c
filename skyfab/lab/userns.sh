# shellcheck shell=sh
# Makes a new user namespace ready for a lab, and becomes the program that is given as arguments by lab/userns.py.
#
# Names of network namespaces are files in /run/netns, /sys has the network of the process that mounted it, and programs
# that ignore $HOME, such as ssh, have /root for the home of this root.
set -eu
PATH=$PATH:/usr/sbin:/sbin
ip link set lo up
mount -t tmpfs tmpfs /run
mount -t sysfs sysfs /sys
[ -x /root ] || mount -t tmpfs -o mode=700 tmpfs /root
exec "$@"
