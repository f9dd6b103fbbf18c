# shellcheck shell=sh
# Sets up a namespace host from inside its new namespaces, and becomes its sshd.
#
# Given by lab/host.py as arguments: the host's folder, the folders of this machine's root that it shares ("etc usr"),
# its name, its addresses ("eth0=10.1.2.3 eth1=…"), the path of sshd, and then the folders of this machine that it is
# lent. Its network interfaces exist.
# Prints the pid of its first process when the host is complete. Errors go to stderr, which is a log.
set -eu
umask 022
folder=$1 folders=$2 name=$3 addresses=$4 sshd=$5
shift 5

# our number on the machine: its /proc is still the one in sight
read -r pid _ </proc/self/stat
exec 3>&1 >&2

hostname "$name"
ip link set lo up
for pair in $addresses; do
    ip address add "${pair#*=}/24" dev "${pair%%=*}"
    ip link set "${pair%%=*}" up
done

cd "$folder"
mount --bind upper root
# As in root.py: an overlay in a user namespace has its notes in other attributes of files.
read -r _ _ users </proc/self/uid_map
[ "$users" = 4294967295 ] && notes= || notes=,userxattr
# One for each folder, as a user namespace can have none of a folder in which something else is mounted.
for shared in $folders; do
    if [ -h "/$shared" ]; then
        ln -sfn "$(readlink "/$shared")" "root/$shared"
    elif [ -d "/$shared" ]; then
        mkdir -p "upper/$shared" "work/$shared"
        layers=lowerdir=/$shared,upperdir=upper/$shared,workdir=work/$shared
        mount -t overlay -o "$layers$notes" overlay "root/$shared" ||
            case $shared in boot | opt | srv | var) ;; *) exit 1 ;; esac
    fi
done
cd root
for lent; do
    mkdir -p ".$lent"
    mount --bind "$lent" ".$lent"
    # In a user namespace, a mount keeps the restrictions that it has outside.
    mount -o remount,bind,ro ".$lent" || mount -o remount,bind,ro,nosuid,nodev ".$lent"
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
