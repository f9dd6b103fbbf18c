"""`Image.of_project`: what scripts and projects say about their packages."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

import skyfab as sky
from skyfab.calls.image import Image, PipIndex
from skyfab.calls.manifest import find

SCRIPT = """#!/usr/bin/env python
# /// script
# requires-python = ">=3.10"
# dependencies = [
#   "numpy>=2",
#
#   "rich",
# ]
# ///
import numpy
"""


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def project(folder: Path, *dependencies: str, more: str = "") -> Path:
    listed = ", ".join(f'"{one}"' for one in dependencies)
    return write(folder / "pyproject.toml", f'[project]\nname = "my-app"\ndependencies = [{listed}]\n{more}')


MEMBER = 'editable = "member"'


def locked(name: str, source: str = 'registry = "https://index.example/simple"') -> str:
    """A package in a uv.lock."""
    return f'[[package]]\nname = "{name}"\nsource = {{ {source} }}\n'


def test_the_block_of_a_script_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    project(tmp_path, "pandas")
    script = write(tmp_path / "train.py", SCRIPT)
    found = find(script)
    assert found is not None
    assert found.source == "train.py (PEP 723)"
    assert Image.of_manifest(found) == Image(pip=["numpy>=2", "rich"]) == Image.of_project(script)
    assert Image.of_project(tmp_path) == Image(pip=["pandas"])


def test_a_script_may_have_a_lock_of_its_own(tmp_path: Path) -> None:
    script = write(tmp_path / "train.py", SCRIPT)
    lock = write(tmp_path / "train.py.lock", "version = 1\n")
    image = Image.of_project(script)
    assert image.lock == str(lock)
    assert not image.is_exact


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (SCRIPT + "\n" + SCRIPT, "2 blocks"),
        (SCRIPT.replace('"rich"', "rich"), "invalid TOML"),
        (SCRIPT.replace(">=3.10", ">=4"), f"requires Python >=4, but skyfab runs with {platform.python_version()}"),
        ('# /// script\n# dependencies = ["a b c"]\n# ///\n', "invalid requirement 'a b c'"),
    ],
)
def test_a_wrong_block_is_an_error(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(sky.UsageError, match=r"train\.py") as raised:
        find(write(tmp_path / "train.py", text))
    assert said in raised.value.message


def test_the_nearest_project_up_to_the_repository_is_taken(tmp_path: Path) -> None:
    project(tmp_path, "outside")
    (tmp_path / "repo" / ".git").mkdir(parents=True)
    script = write(tmp_path / "repo" / "jobs" / "deep" / "train.py", "")
    assert find(script) is None
    with pytest.raises(sky.UsageError, match="no list of packages found"):
        Image.of_project(script)
    write(tmp_path / "repo" / "requirements.txt", "flask\n")
    assert Image.of_project(script).pip == ("flask",)
    project(tmp_path / "repo", "numpy")
    assert Image.of_project(script).pip == ("numpy",)
    write(tmp_path / "repo" / "jobs" / "requirements.txt", "nearer\n")
    assert Image.of_project(script).pip == ("nearer",)


def test_a_pyproject_that_does_not_list_packages_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path / "pyproject.toml", "[tool.ruff]\nline-length = 120\n")
    write(tmp_path / "requirements.txt", "flask\n")
    assert Image.of_project(tmp_path).pip == ("flask",)


def test_dependencies_that_only_a_build_backend_knows_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "app"\ndynamic = ["dependencies"]\n')
    with pytest.raises(sky.UsageError, match="its dependencies are dynamic") as raised:
        find(tmp_path)
    assert "requirements.txt" in str(raised.value.hint)
    (tmp_path / "app.py").touch()
    assert find(tmp_path / "app.py", script_only=True) is None
    (tmp_path / "requirements.txt").write_text("rich\n")
    found = find(tmp_path)
    assert found is not None and found.pip == ("rich",)


def test_a_lock_above_the_project_is_that_of_its_workspace(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    lock = write(tmp_path / "uv.lock", locked("other", source='virtual = "."') + locked("my-app", source=MEMBER))
    project(tmp_path / "member", "numpy")
    found = find(tmp_path / "member")
    assert found is not None
    assert Image.of_manifest(found) == Image(pip=["numpy"], lock=str(lock))
    assert found.source.endswith("pyproject.toml with uv.lock")


def test_a_lock_above_a_project_that_is_no_member_is_not_used(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    write(tmp_path / "uv.lock", locked("my-app", source=MEMBER))
    project(tmp_path / "exp", "mylib", more='[tool.uv.sources]\nmylib = { path = "../lib" }\n')
    assert Image.of_project(tmp_path / "exp") == Image(pip=[f"mylib @ {(tmp_path / 'lib').as_uri()}"])


def test_a_lock_without_a_package_that_has_a_source_is_out_of_date(tmp_path: Path) -> None:
    """The package of that name in an index is another one."""
    more = '[tool.uv.sources]\nMy_Lib = { path = "lib" }\n'
    project(tmp_path, "numpy", "my-lib", "old-lib ; python_version < '3'", more=f'{more}old-lib = {{ path = "old" }}\n')
    lock = write(tmp_path / "uv.lock", locked("numpy"))
    with pytest.raises(sky.UsageError, match=r"uv\.lock is out of date: .*pyproject\.toml has .* my-lib,") as raised:
        Image.of_project(tmp_path)
    assert raised.value.hint == "uv lock"
    write(lock, locked("numpy") + locked("my-lib"))
    assert Image.of_project(tmp_path).lock == str(lock)


def test_sources_of_uv_are_translated(tmp_path: Path) -> None:
    more = """
[tool.uv.sources]
one = { git = "https://git.example/one", tag = "v1", subdirectory = "py" }
Two = { path = "libs/two" }
three = { url = "https://files.example/three.tar.gz" }
four = { index = "own" }
torch = [{ index = "own", marker = "sys_platform == 'linux'" }, { index = "own", marker = "sys_platform != 'linux'" }]
[[tool.uv.index]]
name = "own"
url = "https://own.example/simple"
explicit = true
"""
    project(tmp_path, "one[gpu]>=1 ; python_version > '3'", "two", "three", "four", "torch", "five", more=more)
    image = Image.of_project(tmp_path)
    assert image.pip == (
        'one[gpu] @ git+https://git.example/one@v1#subdirectory=py ; python_version > "3"',
        f"two @ {(tmp_path / 'libs' / 'two').as_uri()}",
        "three @ https://files.example/three.tar.gz",
        *("four", "torch", "five"),
    )
    assert image.pip_indexes == (PipIndex("https://own.example/simple", ("four",)),)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("[tool.uv.sources]\none = { workspace = true }\n", "one is a part of its workspace"),
        ('[tool.uv.sources]\none = [{ index = "a" }, { index = "b" }]\n', "one has several sources"),
        ('[[tool.uv.index]]\nname = "own"\nurl = "https://own.example"\n', "index own serves all packages"),
        (
            '[tool.uv.sources]\none = { path = "one", marker = "sys_platform == \'win32\'" }\n',
            "one has several sources, or one for some cases only",
        ),
        ('[tool.uv.sources]\none = { git = "https://git.example/one", extra = "gpu" }\n', "one for some cases only"),
        ('[tool.uv]\nconstraint-dependencies = ["one<2"]\n', r"its \[tool.uv\] has constraint-dependencies"),
        ('[tool.uv]\nexclude-newer = "2025-01-01"\nprerelease = "allow"\n', r"its \[tool.uv\] has exclude-newer"),
    ],
)
def test_what_only_a_lock_can_say_is_refused_without_one(tmp_path: Path, more: str, said: str) -> None:
    project(tmp_path, "one", more=more)
    with pytest.raises(sky.UsageError, match=said) as raised:
        Image.of_project(tmp_path)
    assert raised.value.hint == "uv lock"
    write(tmp_path / "uv.lock", locked("one"))
    assert Image.of_project(tmp_path).pip == ("one",)


def test_a_file_of_requirements(tmp_path: Path) -> None:
    write(tmp_path / "more" / "base.txt", "rich  # colours\n")
    file = "numpy>=2 \\\n  --hash=sha256:aa --hash=sha256:bb\n-r 'more/base.txt'\n\n# nothing\n-e .\nx @ https://e.example/#x\n"
    write(tmp_path / "requirements.txt", file)
    assert Image.of_project(tmp_path).pip == (
        "numpy>=2 --hash=sha256:aa --hash=sha256:bb",
        "rich",
        "x @ https://e.example/#x",
    )
    write(tmp_path / "requirements.txt", "--extra-index-url https://e.example\nnumpy\n")
    with pytest.raises(sky.UsageError, match="only requirements are supported, not '--extra-index-url"):
        Image.of_project(tmp_path)


def test_a_home_folder_is_no_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "HOME", str(tmp_path))
    write(tmp_path / "requirements.txt", "numpy\n")
    assert find(write(tmp_path / "jobs" / "train.py", "")) is None
    assert find(write(tmp_path / "train.py", "")) is not None, "a script that lies there belongs to it"
