# shellcheck shell=sh
# Installs sshd in a container, from which an image is then made. Ends when stdin is at its end.
#
# Given by providers/container_set.sh: $0 the name of the container. Prints "NAME installed".
set -e
exec 3>&1 >&2
if command -v apt-get; then
    export DEBIAN_FRONTEND=noninteractive
    apt-get -qq update
    apt-get -qq install -y --no-install-recommends openssh-server
    rm -rf /var/lib/apt/lists/*
elif command -v apk; then
    apk add --no-cache openssh-server openssh-keygen
elif command -v microdnf; then
    microdnf -y install openssh-server
elif command -v dnf; then
    dnf -y install openssh-server
elif command -v yum; then
    yum -y install openssh-server
elif command -v zypper; then
    zypper --non-interactive install openssh
else
    echo 'it has none of apt-get, apk, dnf, yum and zypper'
    exit 1
fi
rm -f /etc/ssh/ssh_host_*
