"""The package as users install it: what the wheel has, and each way to install it, typed as in README.

Nothing is downloaded: dependencies are wheels made from the files that are installed beside these tests.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import skyfab
from skyfab.env import uv

pytestmark = pytest.mark.programs

ROOT = Path(__file__).resolve().parent.parent
UV = uv.program()
SITE = Path(sysconfig.get_path("purelib"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    options = ["--quiet", "--wheel", "--no-build-isolation", "--offline", "--python", sys.executable]
    subprocess.run([UV, "build", *options, "--out-dir", folder, ROOT], check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def links(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with wheels of all that skyfab requires."""
    folder = tmp_path_factory.mktemp("links")
    todo, done = ["skyfab"], set()
    while todo:
        found = metadata.distribution(todo.pop())
        if found.name not in {*done, "skyfab"}:
            repack(found, folder)
        done.add(found.name)
        wanted = map(Requirement, found.requires or ())
        todo += [one.name for one in wanted if not one.marker or one.marker.evaluate({"extra": ""})]
        todo = [name for name in todo if metadata.distribution(name).name not in done]
    return folder


def repack(found: metadata.Distribution, folder: Path) -> None:
    """Writes the wheel that a distribution was installed from."""
    tag = re.findall(r"^Tag: (\S+)", found.read_text("WHEEL") or "", re.MULTILINE)[-1]
    files = found.files or []
    info = next(file.parts[0] for file in files if file.parts[0].endswith(".dist-info"))
    generated = {one.name for one in found.entry_points if one.group == "console_scripts"}
    path = folder / f"{canonicalize_name(found.name).replace('-', '_')}-{found.version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        listed = [f"{info}/RECORD"]
        for file in files:
            inner = str(file)
            if file.parent.name == "bin" and file.name not in generated:
                inner = f"{info.removesuffix('.dist-info')}.data/scripts/{file.name}"
            if inner.startswith("..") or "__pycache__" in inner or file.name in {"RECORD", "INSTALLER", "REQUESTED"}:
                continue
            archive.write(str(file.locate()), inner)
            listed.append(inner)
        archive.writestr(f"{info}/RECORD", "".join(f"{inner},,\n" for inner in listed))


def typed(folder: Path, links: Path, *words: str | Path) -> str:
    """What a command prints that a user types in `folder`; it sees no index but `links`, and nothing of this one."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PIP_", "VIRTUAL_ENV"))}
    environ = {
        **kept,
        "HOME": str(folder),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "UV_OFFLINE": "1",
        "UV_DEFAULT_INDEX": links.parent.as_uri(),  # no index: it has no folder for any package
        "UV_FIND_LINKS": str(links),
        "UV_PYTHON": sys.executable,
        "UV_TOOL_DIR": str(folder / "tools"),
        "UV_TOOL_BIN_DIR": str(folder / "bin"),
        "UV_NO_CONFIG": "1",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(links),
    }
    done = subprocess.run([*map(str, words)], cwd=folder, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, words))}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = [path.relative_to(ROOT) for path in (ROOT / "skyfab").rglob("*") if path.is_file()]
    assert names == {path.as_posix() for path in files if "__pycache__" not in path.parts}


def test_the_metadata_has_the_version_and_says_where_things_are(wheel: Path) -> None:
    (about,) = (text for text in zipfile.ZipFile(wheel).namelist() if text.endswith("/METADATA"))
    text = zipfile.ZipFile(wheel).read(about).decode()
    assert f"\nVersion: {skyfab.__version__}\n" in text
    assert "\nRequires-Python: >=3.10\n" in text
    assert "\nLicense-Expression: MIT\n" in text
    urls = set(re.findall(r"^Project-URL: (\w+), ", text, re.MULTILINE))
    assert urls == {"Changelog", "Documentation", "Homepage", "Issues"}


@pytest.mark.slow
def test_uv_installs_it_as_a_tool(wheel: Path, links: Path, tmp_path: Path) -> None:
    typed(tmp_path, links, UV, "tool", "install", wheel)
    assert typed(tmp_path, links, tmp_path / "bin" / "skyfab", "--version") == f"skyfab {skyfab.__version__}\n"


@pytest.mark.slow
def test_uv_adds_it_to_a_project(wheel: Path, links: Path, tmp_path: Path) -> None:
    typed(tmp_path, links, UV, "init", "--bare", "--name", "sample")
    typed(tmp_path, links, UV, "add", wheel)
    (tmp_path / "double.py").write_text(
        "import skyfab as sky\n\n"
        "@sky.function\ndef double(x):\n    return 2 * x\n\n"
        "with sky.Compute('local', ui='none') as compute:\n    print(double(21) >> compute)\n"
    )
    assert typed(tmp_path, links, UV, "run", "double.py") == "42\n"


@pytest.mark.slow
@pytest.mark.torch
def test_pip_installs_it_and_train_works_outside_a_checkout(wheel: Path, links: Path, tmp_path: Path) -> None:
    """torch comes from the environment of these tests: it would be large to install again."""
    pytest.importorskip("torch")
    typed(tmp_path, links, getattr(sys, "_base_executable", sys.executable), "-m", "venv", "venv")
    typed(tmp_path, links, tmp_path / "venv" / "bin" / "pip", "install", wheel)
    (there,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (there / "torch.pth").write_text(f"{SITE}\n")
    where = typed(tmp_path, links, tmp_path / "venv" / "bin" / "python", "-c", "import skyfab; print(skyfab.__file__)")
    assert where.startswith(str(there))
    assert "evaluated locally: " in typed(tmp_path, links, tmp_path / "venv" / "bin" / "skyfab", "train", "--epochs=1")


def test_the_release_workflow_publishes_without_a_token() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert "id-token: write" in text and "attestations: true" in text
    assert not re.search(r"secrets\.|password:", text)
