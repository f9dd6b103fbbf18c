# shellcheck shell=sh
# Sets up a namespace host from inside its new namespaces, and becomes its sshd.
#
# Given by lab/host.py as arguments: the host's folder, its name, its addresses ("eth0=10.1.2.3 eth1=…"), the path of
# sshd, and then the folders of this machine that it is lent. Its network interfaces exist.
# Prints the pid of its first process when the host is complete. Errors go to stderr, which is a log.
set -eu
umask 022
folder=$1 name=$2 addresses=$3 sshd=$4
shift 4

# our number on the machine: its /proc is still the one in sight
read -r pid _ </proc/self/stat
exec 3>&1 >&2

echo "$name" >/proc/sys/kernel/hostname
ip link set lo up
for pair in $addresses; do
    ip address add "${pair#*=}/24" dev "${pair%%=*}"
    ip link set "${pair%%=*}" up
done

cd "$folder"
mount -t overlay -o lowerdir=/,upperdir=upper,workdir=work overlay root
cd root
for lent; do
    mkdir -p ".$lent"
    mount --bind "$lent" ".$lent"
    mount -o remount,bind,ro ".$lent"
done
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs -o mode=755 tmpfs dev
for device in null zero full random urandom tty kfd dri $(cd /dev && echo nvidia*); do
    if [ -d "/dev/$device" ]; then mkdir "dev/$device"
    elif [ -e "/dev/$device" ]; then : >"dev/$device"
    else continue; fi
    mount --bind "/dev/$device" "dev/$device"
done
mkdir dev/pts dev/shm run/old run/sshd run/lock
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
ln -s fd/0 dev/stdin
ln -s fd/1 dev/stdout
ln -s fd/2 dev/stderr
mount -t devpts -o newinstance,ptmxmode=666,mode=620,gid=5 devpts dev/pts
mount -t tmpfs -o mode=1777 tmpfs dev/shm

pivot_root . run/old
cd /
umount -l /run/old
rmdir /run/old
echo "$pid" >&3
exec 3>&-
exec chroot . "$sshd" -D -e
