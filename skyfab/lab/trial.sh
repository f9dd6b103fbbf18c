# shellcheck shell=sh
# Tries whether a namespace host could start here: makes a bridge, a cable and a root folder as boot.sh does.
#
# Given by lab/namespace.py as an argument: a folder with the empty folders upper, work and root.
set -eu
cd "$1"
ip link add trial0 type bridge
ip link add trial1 type veth peer name trial2
read -r _ _ users </proc/self/uid_map
[ "$users" = 4294967295 ] && notes= || notes=,userxattr
mount -t overlay -o "lowerdir=/etc,upperdir=upper,workdir=work$notes" overlay root
mount -t proc proc root
mount -t sysfs sysfs root
mount -t tmpfs tmpfs root
