"""Small helpers: atomic writes, and the cache folder of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyfab._util import atomic
from skyfab._util.cache import cache_folder


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
