"""Atomic writes of files on this machine."""

from __future__ import annotations

from pathlib import Path
from tempfile import NamedTemporaryFile

from skyfab._util.cache import cache_folder, made_cache


def write(path: Path, content: bytes | str, *, mode: int = 0o600) -> None:
    """Writes a file, and its folder if needed. Other processes see the whole file or none of it."""
    if path.is_relative_to(cache_folder()):
        made_cache()
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=path.parent, prefix=".new-", delete=False) as file:
        try:
            file.write(content.encode() if isinstance(content, str) else content)
            file.close()
            Path(file.name).chmod(mode)
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
