# shellcheck shell=sh
# The first process of a container: makes a host key, starts sshd, and ends when stdin is at its end.
#
# Given by providers/container_set.sh: $0 the name of the container, $1 the public key that may log in.
# Prints "NAME bare" if there is no sshd, else "NAME ready TYPE KEY" with the public host key once sshd listens.
sshd=$(PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin command -v sshd) || {
    echo "$0 bare"
    exit 0
}
set -e
home=~root
mkdir -p /run/sshd /run/skyfab "$home/.ssh"
chmod 755 /run/sshd
# What the image sets with ENV is the environment of its first process, and sshd hands none of that on.
env | grep -Ev '^(HOME|HOSTNAME|OLDPWD|PWD|SHLVL|TERM|USER|_)=' >"$home/.ssh/environment" || true
# Without PAM, sshd refuses accounts that are locked by a "!".
[ ! -f /etc/shadow ] || sed -i 's/^root:!/root:*/' /etc/shadow
echo "$1" >/run/skyfab/authorized_keys
ssh-keygen -q -t ed25519 -N '' -C '' -f /run/skyfab/key >&2
"$sshd" -D -e -f /dev/null -h /run/skyfab/key -o AuthorizedKeysFile=/run/skyfab/authorized_keys -o StrictModes=no \
    -o PidFile=/run/skyfab/pid -o PermitRootLogin=prohibit-password -o PasswordAuthentication=no \
    -o KbdInteractiveAuthentication=no -o PermitUserEnvironment=yes -o UseDNS=no -o PrintMotd=no -o PrintLastLog=no \
    -o 'KexAlgorithms=-sntrup761*' -o 'Subsystem=sftp internal-sftp' -o LogLevel=ERROR &
# It writes the file once it listens.
while [ ! -s /run/skyfab/pid ]; do
    kill -0 $!
    sleep 0.01
done
read -r kind key _ </run/skyfab/key.pub
echo "$0 ready $kind $key"
# Not the last command: a shell that became cat would leave zombies.
cat >/dev/null
exit 0
