"""What `run --sync` sends of a folder: what git would, without environments, caches and hidden folders."""

from __future__ import annotations

import subprocess
from pathlib import Path

from skyfab.calls.gitignore import as_git
from skyfab.files.entries import FILE, text, walk

FILES = {
    ".gitignore": "*\n",  # above the repository: it does not count
    "repo/.gitignore": "secret.py\n/lab/app/only_top.py\n*.tmp.py\nbuild/\n# comment\n*_pb.py\n",
    "repo/lab/.gitignore": "drafts\n",
    "repo/lab/app/.gitignore": "local_*.py\n!local_kept.py\n",
    "repo/lab/app/secret.py": "",
    "repo/lab/app/only_top.py": "",
    "repo/lab/app/x.tmp.py": "",
    "repo/lab/app/build/made.py": "",
    "repo/lab/app/drafts/draft.py": "",
    "repo/lab/app/local_a.py": "",
    "repo/lab/app/local_kept.py": "",
    "repo/lab/app/a_pb.py": "",
    "repo/lab/app/data.csv": "",
    "repo/lab/app/sub/.gitignore": "/inner.py\nlocal_more.py\n!kept_pb.py\n",
    "repo/lab/app/sub/inner.py": "",
    "repo/lab/app/sub/deeper/inner.py": "",
    "repo/lab/app/sub/local_more.py": "",
    "repo/lab/app/sub/kept_pb.py": "",
}
LEFT_OUT = ["env/pyvenv.cfg", "env/lib/a.py", ".hidden/a.py", "node_modules/a.py", "__pycache__/a.pyc"]


def test_what_git_ignores_is_left_out(tmp_path: Path) -> None:
    """The repository's top above the folder, ignore files in between and below: as git itself sees it."""
    top = tmp_path / "repo/lab/app"
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    git = ["git", "-c", "core.excludesFile=/dev/null"]
    subprocess.run([*git, "init", "-q"], cwd=tmp_path / "repo", check=True)
    words = [*git, "ls-files", "--cached", "--others", "--exclude-standard"]
    seen = subprocess.run(words, cwd=top, check=True, capture_output=True, text=True).stdout.split()
    assert "data.csv" in seen
    assert "secret.py" not in seen
    for name in LEFT_OUT:
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).touch()
    found = walk(bytes(top), b"", [], as_git(top))
    assert sorted(text(entry.path) for entry, _ in found if entry.kind == FILE) == sorted(seen)


def test_other_encodings_hide_nothing(tmp_path: Path) -> None:
    """Git compares bytes, and skips the mark that some editors write first."""
    for number, content in enumerate((b"# \xfcbung\nsecret.env\n", b"\xef\xbb\xbfsecret.env\n")):
        top = tmp_path / str(number)
        top.mkdir()
        (top / ".gitignore").write_bytes(content)
        for name in ("secret.env", "train.py"):
            (top / name).touch()
        names = {text(entry.path) for entry, _ in walk(bytes(top), b"", [], as_git(top)) if entry.kind == FILE}
        assert "train.py" in names
        assert "secret.env" not in names
