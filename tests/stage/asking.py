"""Lab hosts that take no keys: their servers ask `pat` for a password, or for a password and a one-time code."""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

import pytest

from skyfab.lab import LabHost

_FILE: Final = "/etc/ssh/codes"
"""The secrets of users on a host. PAM notes there which codes have been used."""
_PAM: Final = f"""\
auth required pam_unix.so nodelay
auth required pam_oath.so usersfile={_FILE} window=20 digits=6
account required pam_permit.so
session required pam_permit.so
"""


def take_passwords_only(host: LabHost) -> None:
    _configure(host, "PubkeyAuthentication no")


def ask_for_codes(host: LabHost, password: str) -> None:
    """By keyboard-interactive and PAM (libpam-oath). Skips the test where that is not installed."""
    if not any(host.path("/usr/lib").glob("*/security/pam_oath.so")):
        pytest.skip("hosts with one-time codes need libpam-oath")
    host.path("/etc/pam.d/sshd").write_text(_PAM)
    secrets = host.path(_FILE)
    secrets.write_text(f"HOTP pat - {_secret(password).hex()}\n")
    secrets.chmod(0o600)
    _configure(
        host, "PubkeyAuthentication no", "PasswordAuthentication no", "KbdInteractiveAuthentication yes", "UsePAM yes"
    )


def code(password: str, number: int) -> str:
    """The code of that number (RFC 4226). A host takes each once, and afterwards none with a lower number."""
    digest = hmac.digest(_secret(password), number.to_bytes(8, "big"), "sha1")
    start = digest[-1] & 15
    return f"{(int.from_bytes(digest[start : start + 4], 'big') & 0x7FFFFFFF) % 1_000_000:06}"


def _configure(host: LabHost, *lines: str) -> None:
    """Starts the server with these settings. The first of a name is the one that holds."""
    settings = host.path("/etc/ssh/sshd_config")
    settings.write_text("\n".join([*lines, settings.read_text()]))
    host.reboot()


def _secret(password: str) -> bytes:
    return hashlib.sha256(password.encode()).digest()[:20]
