# shellcheck shell=sh
# Brings boxes up, and halts them when stdin is at its end, because the program that holds the other end has closed it or
# has exited.
#
# Given by providers/vagrant.py: $0 the vagrant program, $1 a file for what it prints, then the boxes. Prints the exit
# code of vagrant up.
log=$1
shift
exec 3<&0
"$0" up "$@" </dev/null >"$log" 2>&1
echo $?
cat <&3 >/dev/null
exec "$0" halt "$@" </dev/null >/dev/null 2>&1
