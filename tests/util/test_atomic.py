"""Small helpers: atomic writes, and the cache folder of this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from skyfab._util import atomic
from skyfab._util.cache import cache_folder, made_cache


def test_a_file_is_written_whole_with_its_mode_and_folder(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    atomic.write(path, "é")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == ("é".encode(), 0o600)
    atomic.write(path, b"\0", mode=0o755)
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"\0", 0o755)


def test_a_write_that_fails_leaves_the_file_as_it_was_and_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.mkdir()
    with pytest.raises(OSError, match="directory"):
        atomic.write(path, "text")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("base", ["", "relative"])
def test_the_cache_folder_is_in_the_home_folder_unless_an_absolute_one_is_named(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    assert cache_folder() == tmp_path / ".cache" / "skyfab"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert cache_folder() == tmp_path / "other" / "skyfab"


@pytest.mark.parametrize("before", [None, 0o775, 0o755, 0o700])
def test_the_cache_folder_is_made_closed_to_others(
    before: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the umask is. One that others can only read stays: the user may have opened it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a" / "b"))
    folder = cache_folder()
    if before is not None:
        folder.mkdir(parents=True)
        folder.chmod(before)
    mask = os.umask(0o002)
    try:
        atomic.write(folder / "new" / "file", "x")
        assert made_cache() == folder
    finally:
        os.umask(mask)
    assert folder.stat().st_mode & 0o777 == (0o755 if before == 0o755 else 0o700)
    assert before is not None or folder.parent.stat().st_mode & 0o777 == 0o700
