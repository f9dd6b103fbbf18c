#!/bin/sh
# What hosts.md is about: an inventory of Ansible.
set -eu
cat >cluster.ini <<'END'
[gpu]
node[1:2] ansible_port=2222

[gpu:vars]
ansible_user=ada

[windows]
desk ansible_connection=winrm
END
