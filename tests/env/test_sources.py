"""Packages without wheels are built here, from an archive, a git address or a folder; a uv.lock fixes versions."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from stage import remote
from stage.index import Index, make_source, make_wheel, sha256

import skyfab as sky
from skyfab._util.cache import cache_folder
from skyfab.calls.image import Image
from skyfab.env import gc, uv
from skyfab.env.facts import Target
from skyfab.env.lock import known_lock, make_lock, read_lock
from skyfab.env.resolve import LockError

pytestmark = pytest.mark.usefixtures("world")
version_of = sky.function(remote.version_of)
HERE = Target(
    system=platform.system(),
    arch=platform.machine(),
    libc=" ".join(platform.libc_ver()),
    python=f"{sys.version_info[0]}.{sys.version_info[1]}",
)


def names(image: Image, target: Target = HERE) -> list[str]:
    return [f"{wheel.package} {wheel.version}" for wheel in make_lock(image, target).wheels]


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    ran = subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True)
    return ran.stdout.strip()


def committed(folder: Path) -> str:
    """Makes a folder a git repository; returns the commit."""
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "first")
    return git(folder, "rev-parse", "HEAD")


# ---- sources


def test_the_newest_version_is_taken_though_it_needs_a_source(index: Index) -> None:
    """As uv does: else a package with one such dependency would become a version of years ago."""
    index.add("shelf", "1.0")
    index.add("shelf", "2.0", requires=["stone"])
    index.add_source("stone", "1.0")
    assert names(Image(pip=["shelf"])) == ["shelf 2.0", "stone 1.0"]


def test_a_source_that_another_package_needs_is_built_once(index: Index) -> None:
    index.add("shelf", "1.0", requires=["stone"])
    index.add_source("stone", "1.0")
    assert names(Image(pip=["shelf"])) == ["shelf 1.0", "stone 1.0"]
    index.close()
    (wheel,) = (cache_folder() / "built").glob("*/*.whl")
    before = wheel.stat().st_ino
    assert names(Image(pip=["shelf"])) == ["shelf 1.0", "stone 1.0"]
    assert wheel.stat().st_ino == before


def test_a_built_wheel_that_was_removed_is_built_again(index: Index) -> None:
    index.add_source("stone", "1.0")
    image = Image(pip=["stone"])
    make_lock(image, HERE)
    (wheel,) = (cache_folder() / "built").glob("*/*.whl")
    os.utime(wheel, (0, 0))
    os.utime(wheel.parent, (0, 0))
    assert gc.sweep_here(30).counts["built"] == 1
    assert not wheel.exists()
    assert names(image) == ["stone 1.0"]
    assert wheel.exists()


def test_a_source_that_cannot_be_built_says_why(index: Index, tmp_path: Path) -> None:
    source = make_source(tmp_path / "stone", "stone", "1.0")
    (source / "backend.py").write_text("def build_wheel(*_):\n    raise RuntimeError('no compiler here')\n")
    with pytest.raises(LockError, match=r"(?s)cannot build stone.*no compiler here"):
        make_lock(Image(pip=[f"stone @ {source.as_uri()}"]), HERE)
    assert list((cache_folder() / "built").iterdir()) == []


def test_a_git_address_is_built(index: Index, tmp_path: Path) -> None:
    index.add("book", "2.0")
    source = make_source(tmp_path / "stone", "stone", "1.0", requires=["book"])
    first = committed(source)
    (source / "code.txt").write_text("version = 'later'\n")
    git(source, "commit", "-q", "-am", "second")
    at = source.as_uri()
    assert names(Image(pip=[f"stone @ git+{at}"])) == ["book 2.0", "stone 1.0"]
    make_lock(Image(pip=[f"stone @ git+{at}@{first}"]), HERE)
    said = {code(wheel) for wheel in (cache_folder() / "built").glob("*/*.whl")}
    assert said == {"version = '1.0'\n", "version = 'later'\n"}


def code(wheel: Path) -> str:
    import zipfile

    with zipfile.ZipFile(wheel) as archive:
        return archive.read("stone.py").decode()


def test_a_folder_is_built_again_when_it_changes(index: Index, tmp_path: Path) -> None:
    source = make_source(tmp_path / "my stone", "stone", "1.0")
    image = Image(pip=[f"stone @ {source.as_uri()}"])
    before = make_lock(image, HERE)
    assert known_lock(image, HERE) == before
    (source / "code.txt").write_text("version = 'changed'\n")
    assert known_lock(image, HERE) is None
    assert make_lock(image, HERE).digest != before.digest


def test_an_archive_of_this_machine_is_locked_again_when_it_changes(index: Index, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "shelf", "1.0")
    image = Image(pip=[f"shelf @ {wheel.as_uri()}"])
    before = make_lock(image, HERE)
    assert known_lock(image, HERE) == before
    make_wheel(tmp_path, "shelf", "1.0", files={"shelf/new.py": ""})
    (after,) = make_lock(image, HERE).wheels
    assert after.sha256 == sha256(wheel) != before.wheels[0].sha256


def test_a_lock_of_ones_own_may_name_sources(index: Index, tmp_path: Path) -> None:
    make_source(tmp_path / "stone", "stone", "1.0")
    lock = tmp_path / "pylock.toml"
    lock.write_text(
        'lock-version = "1.0"\n[[packages]]\nname = "stone"\n[packages.directory]\npath = "stone"\n'
        '[[packages]]\nname = "other"\nmarker = "sys_platform == \'win32\'"\n[packages.directory]\npath = "nowhere"\n'
    )
    assert [wheel.filename for wheel in read_lock(lock, HERE).wheels] == ["stone-1.0-py3-none-any.whl"]


# ---- uv.lock


def locked(folder: Path, *dependencies: str, more: str = "") -> Image:
    """A project with a uv.lock, as an image."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = ", ".join(f'"{one}"' for one in dependencies)
    text = f'[project]\nname = "top"\nversion = "0"\nrequires-python = ">=3.10"\ndependencies = [{listed}]\n{more}'
    (folder / "pyproject.toml").write_text(text)
    uv.run_uv("lock", "--python", sys.executable, cwd=folder)
    return Image.of_project(folder)


def test_versions_are_those_of_uv_lock(index: Index, tmp_path: Path) -> None:
    index.add("shelf", "1.0", requires=["book"])
    index.add("book", "1.0")
    image = locked(tmp_path / "app", "shelf")
    assert image == Image(pip=["shelf"], lock=str(tmp_path / "app" / "uv.lock"))
    index.add("shelf", "2.0")
    index.add("book", "2.0")
    assert names(image) == ["book 1.0", "shelf 1.0"]
    assert names(Image(pip=["shelf"])) == ["shelf 2.0"]


def test_versions_are_those_of_a_scripts_own_lock(index: Index, tmp_path: Path) -> None:
    index.add("shelf", "1.0")
    script = tmp_path / "train.py"
    script.write_text('# /// script\n# requires-python = ">=3.10"\n# dependencies = ["shelf"]\n# ///\n')
    uv.run_uv("lock", "--python", sys.executable, "--script", "train.py", cwd=tmp_path)
    index.add("shelf", "2.0")
    assert names(Image.of_project(script)) == ["shelf 1.0"]


def test_each_host_has_the_torch_of_uv_lock_that_fits_it(index: Index, tmp_path: Path) -> None:
    """The lock has a build for CUDA, as PyPI has; the mirror also has one without."""
    index.add("torch", "2.0", requires=["nvidia-thing"])
    index.add("nvidia-thing", "1.0")
    image = locked(tmp_path / "app", "torch")
    index.add("torch", "2.0+cpu")
    index.add("torch", "3.0+cpu")
    assert names(image) == ["torch 2.0+cpu"]


def test_a_build_in_uv_lock_counts_only_if_the_project_names_its_index(index: Index, tmp_path: Path) -> None:
    """Else it is the one that fitted the machine where the lock was made."""
    gpu = replace(HERE, driver="580.10")
    index.add("torch", "2.0+cpu")
    image = locked(tmp_path / "app", "torch")
    more = (
        f'[[tool.uv.index]]\nname = "own"\nurl = "{index.url}"\nexplicit = true\n'
        '[tool.uv.sources]\ntorch = { index = "own" }\n'
    )
    named = locked(tmp_path / "named", "torch", more=more)
    index.add("torch", "2.0+cu128")
    assert names(image, gpu) == ["torch 2.0+cu128"]
    assert names(image) == ["torch 2.0+cpu"]
    assert names(named, gpu) == ["torch 2.0+cpu"]


def test_a_file_that_is_not_the_one_in_uv_lock_is_refused(index: Index, tmp_path: Path) -> None:
    index.add("shelf", "1.0")
    image = locked(tmp_path / "app", "shelf")
    make_wheel(index.folder, "shelf", "1.0", files={"shelf/more.py": "evil = True\n"})
    uv.run_uv("cache", "clean")
    with pytest.raises(LockError, match=r"shelf-1\.0-py3-none-any\.whl does not match uv\.lock"):
        make_lock(image, HERE)


def test_a_workspace_and_a_git_address_of_uv_lock_are_built(index: Index, tmp_path: Path) -> None:
    index.add("book", "1.0")
    committed(make_source(tmp_path / "stone", "stone", "1.0"))
    make_source(tmp_path / "app" / "libs" / "brick", "brick", "3.0", requires=["book"])
    more = (
        f'[tool.uv.workspace]\nmembers = ["libs/*"]\n[tool.uv.sources]\nbrick = {{ workspace = true }}\n'
        f'stone = {{ git = "{(tmp_path / "stone").as_uri()}" }}\n'
    )
    image = locked(tmp_path / "app", "brick", "stone", more=more)
    index.add("book", "2.0")
    assert names(image) == ["book 1.0", "brick 3.0", "stone 1.0"]
    member = Image.of_project(tmp_path / "app" / "libs" / "brick")
    assert (member.pip, member.lock) == (("book",), image.lock)


def test_a_broken_uv_lock_says_so(index: Index, tmp_path: Path) -> None:
    index.add("shelf", "1.0")
    image = locked(tmp_path / "app", "shelf")
    Path(str(image.lock)).write_text("version = 1\nrequires-python = 3\n")
    with pytest.raises(LockError, match=r"uv\.lock") as raised:
        make_lock(image, HERE)
    assert "uv lock" in str(raised.value.hint)
    with pytest.raises(LockError, match="cannot read the lock"):
        make_lock(Image(pip=["shelf"], lock=str(tmp_path / "none" / "uv.lock")), HERE)


def test_plugins_add_packages_to_those_of_uv_lock(tmp_path: Path) -> None:
    host = sky.Host(name="node1")
    image = Image(pip=["shelf"], lock=str(tmp_path / "uv.lock"))
    assert "transformers" in sky.plugins.huggingface().transform(image, host).pip
    exact = Image(lock="pylock.toml")
    assert sky.plugins.huggingface().transform(exact, host) == exact
