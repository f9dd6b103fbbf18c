"""One-time codes of lab hosts: PAM asks for a password and a code (two factors, libpam-oath)."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from typing import Final

USER: Final = "pat"
FILE: Final = "/etc/ssh/codes"
"""The secrets of users on a host. PAM notes there which codes have been used."""
PAM: Final = f"""\
auth required pam_unix.so nodelay
auth required pam_oath.so usersfile={FILE} window=20 digits=6
account required pam_permit.so
session required pam_permit.so
"""
"""The host's /etc/pam.d/sshd."""


def code(password: str, number: int) -> str:
    """The code of that number (RFC 4226). A host takes each once, and afterwards none with a lower number."""
    digest = hmac.digest(_secret(password), number.to_bytes(8, "big"), "sha1")
    start = digest[-1] & 15
    return f"{(int.from_bytes(digest[start : start + 4], 'big') & 0x7FFFFFFF) % 1_000_000:06}"


def put(etc: Path, password: str) -> None:
    """Writes the files for codes below a host's /etc."""
    place = etc / "pam.d"
    place.mkdir(mode=0o755, exist_ok=True)
    (place / "sshd").write_text(PAM)
    secrets = etc / Path(FILE).relative_to("/etc")
    secrets.write_text(f"HOTP {USER} - {_secret(password).hex()}\n")
    secrets.chmod(0o600)


def _secret(password: str) -> bytes:
    return hashlib.sha256(password.encode()).digest()[:20]
