"""Names of hosts in known_hosts: what is offered as a host, and what is not."""

from __future__ import annotations

from pathlib import Path

from skyfab.inventory.ssh_config import known_hosts as names


def test_names_of_known_hosts(tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    file.write_text(
        "# mine\nnode1,10.0.0.1 ssh-ed25519 AAAA\n[node2]:2222 ssh-rsa AAAA\n|1|abc=|def= ssh-rsa AAAA\n"
        "@revoked node3 ssh-rsa AAAA\ngithub.com ssh-ed25519 AAAA\nnode1 ssh-rsa BBBB\n*.example.com ssh-rsa A\nbad\n"
        "[fd00::2]:2222 ssh-rsa AAAA\nfd00::3 ssh-rsa AAAA\n"
    )
    assert names(file) == ["node1", "node2:2222", "[fd00::2]:2222", "fd00::3"]
    assert names(tmp_path / "none") == []
