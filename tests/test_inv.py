"""./inv and what it stands on: pip's configuration in uv's words, the set-up of .venv, the groups of tests.

The set-ups run the real ./inv with the real uv, offline, against an index that each test writes to a folder.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.programs

ROOT = Path(__file__).resolve().parent.parent
groups = SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "groups.py")))
BIN = Path(sys.executable).parent
HAS_GPU = runpy.run_path(str(ROOT / "tools" / "bootstrap.py"))["has_gpu"]()
NO_FILES = {"PIP_CONFIG_FILE": os.devnull}


# pip's configuration


# ./inv


@dataclass
class Checkout:
    """A small project with the real ./inv, and an index in a folder for everything that it installs."""

    folder: Path
    index: Path
    links: Path
    environ: dict[str, str] = field(default_factory=dict)

    def inv(self, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        options = {"env": self.environ, "capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
        return subprocess.run([self.folder / "inv", *arguments], cwd=cwd, **options)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "start_new_session": True}
        return subprocess.Popen([self.folder / "inv", *arguments], env=self.environ, text=True, **pipes)

    def installed(self, package: str) -> list[str]:
        found = self.folder.glob(f".venv/lib/python*/site-packages/{package}-*.dist-info")
        return [path.name.removesuffix(".dist-info") for path in found]


PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "sample"
version = "1"
dependencies = ["invoke"]
optional-dependencies = { torch = ["torch>=2.6"] }
[dependency-groups]
dev = ["linter"]
"""
BACKEND = """
import shutil
def build_editable(folder, config_settings=None, metadata_directory=None):
    return shutil.copy("sample-1-py3-none-any.whl", folder).rpartition("/")[2]
"""
INVOKE = "import os, sys\ndef main(): print(os.getcwd(), *sys.argv[1:], sep='|')\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """Nothing set up yet. The index's newest torch wants CUDA; find-links has an older one for the CPU."""
    made = Checkout(tmp_path / "a check'out", tmp_path / "simple", tmp_path / "wheels")
    for name in ("inv", "tools/bootstrap.py", "skyfab/env/pipconf.py"):
        target = made.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    (made.folder / "pyproject.toml").write_text(PYPROJECT)
    (made.folder / "backend.py").write_text(BACKEND)
    (made.folder / "constraints.txt").touch()
    (made.folder / "tasks.py").write_text("import invoke\n\ninvoke.main()\n")
    wheel(made.folder, "sample", "1", requires=("invoke", "torch>=2.6; extra == 'torch'"), extras=("torch",))
    wheel(made.index / "linter", "linter", "1")
    wheel(made.index / "invoke", "invoke", "2.2", files={"invoke.py": INVOKE}, scripts="invoke = invoke:main")
    wheel(made.index / "torch", "torch", "3.0", requires=("nvidia-everything",))
    wheel(made.index / "nvidia-everything", "nvidia_everything", "1")
    wheel(made.links, "torch", "2.13.0+cpu")
    made.environ = {
        **NO_FILES,
        "PATH": os.pathsep.join([str(BIN), "/usr/bin", "/bin"]),
        "HOME": str(tmp_path),
        "PIP_INDEX_URL": str(made.index),
        "PIP_FIND_LINKS": str(made.links),
        "UV_OFFLINE": "1",  # PyTorch's own index is the last place to look: not from a test
    }
    return made


def wheel(
    folder: Path,
    name: str,
    version: str,
    *,
    requires: tuple[str, ...] = (),
    files: dict[str, str] | None = None,
    scripts: str = "",
    extras: tuple[str, ...] = (),
) -> None:
    """Write a wheel, and the page that lists it."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    needs = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    needs += "".join(f"Provides-Extra: {extra}\n" for extra in extras)
    content = {
        **(files or {}),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{scripts}\n",
    }
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in content.items():
            archive.writestr(member, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{member},,\n" for member in content) + f"{info}/RECORD,,\n")
    (folder / "index.html").write_text(f'<a href="{path.name}">{path.name}</a>')


def test_the_first_run_sets_up_and_the_second_says_nothing(checkout: Checkout, tmp_path: Path) -> None:
    first = checkout.inv("train", "--epochs=1", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "inv: making .venv" in first.stderr
    # The caller's folder and words arrive as they are.
    assert first.stdout == f"{tmp_path}|train|--epochs=1\n"
    second = checkout.inv(cwd=tmp_path)
    assert (second.stderr, second.stdout) == ("", f"{tmp_path}|--list\n")


def test_tools_for_development_come_with_the_tasks_that_need_them(checkout: Checkout) -> None:
    first = checkout.inv("train")
    assert first.stderr.endswith("/bin/activate\n"), "how to have skyfab and python from now on"
    assert checkout.installed("linter") == []
    assert "inv: installing" in checkout.inv("test").stderr
    assert checkout.installed("linter") == ["linter-1"]
    assert checkout.inv("train").stderr == "", "an environment for development is enough for everything"
    assert checkout.installed("linter") == ["linter-1"]


def test_without_a_gpu_no_cuda_is_installed(checkout: Checkout) -> None:
    done = checkout.inv()
    assert done.returncode == 0, done.stderr
    assert checkout.installed("torch") == ["torch-3.0" if HAS_GPU else "torch-2.13.0+cpu"]
    assert bool(checkout.installed("nvidia_everything")) == HAS_GPU


@pytest.mark.skipif(HAS_GPU, reason="with a GPU the torch of the index is wanted")
def test_without_a_cpu_build_the_index_has_torch(checkout: Checkout) -> None:
    """As on a machine that reaches PyPI alone: its torch is built for CUDA, and works without a GPU too."""
    del checkout.environ["PIP_FIND_LINKS"]
    done = checkout.inv("train")
    assert done.returncode == 0, done.stderr
    assert "inv: torch 3.0 from the index, built for CUDA (about 3 GB): no CPU build was found; " in done.stderr
    assert "PyTorch's CPU index" in done.stderr, "where it was looked for"
    assert checkout.installed("torch") == ["torch-3.0"]
    assert checkout.installed("nvidia_everything") == ["nvidia_everything-1"]


def test_without_any_torch_it_ends_at_once_with_the_way_out(checkout: Checkout) -> None:
    del checkout.environ["PIP_FIND_LINKS"]
    shutil.rmtree(checkout.index / "torch")
    done = checkout.inv("train")
    assert done.returncode == 1
    assert "inv: no torch for this machine\ninv: hint: " in done.stderr
    assert done.stdout == ""
    assert checkout.installed("invoke") == []


def test_an_interrupted_set_up_is_done_again(checkout: Checkout) -> None:
    running = checkout.start()
    until((checkout.folder / ".venv").exists)
    os.killpg(running.pid, signal.SIGKILL)
    running.communicate()
    assert not (checkout.folder / ".venv" / ".inv-stamp").exists()
    after = checkout.inv("after")
    assert "inv: making .venv" in after.stderr
    assert after.stdout.endswith("|after\n")


def test_two_at_once_make_one_environment(checkout: Checkout) -> None:
    both = [checkout.start("one"), checkout.start("two")]
    ends = [process.communicate() for process in both]
    assert [out.rpartition("|")[2] for out, _ in ends] == ["one\n", "two\n"], ends
    assert sum("inv: making .venv" in err for _, err in ends) == 1


def test_a_home_that_cannot_be_written_is_not_needed(checkout: Checkout) -> None:
    checkout.environ["HOME"] = "/proc/nowhere"
    done = checkout.inv()
    assert done.returncode == 0, done.stderr
    assert (checkout.folder / ".inv" / "cache").is_dir()


def until(condition: object, seconds: float = 60) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# ---- the tests in groups


def test_every_file_of_tests_is_run_the_longest_first() -> None:
    names = groups.in_order(groups.tests(fast=False))
    places = [path for name in names for path in (name, os.path.dirname(name))]  # noqa: PTH120
    long = [f"tests/{name}" for name in groups.LONG]
    assert [*dict.fromkeys(place for place in places if place in long)] == long, "LONG names what exists"
    folders = [Path(name).parent.name for name in names]
    device = folders.index("device")
    assert {*folders[device : device + folders.count("device")]} == {"device"}, "they share a pool"
    assert len(names) == len(set(names))
    assert {ROOT / name for name in names} == set((ROOT / "tests").rglob("test_*.py"))


@pytest.mark.programs
def test_processes_share_the_files_of_tests(tmp_path: Path) -> None:
    """Each file is run by one of them, in order; failures and files without tests count as ever."""
    for name, text in {
        "test_a.py": "import time\ndef test_a():\n    time.sleep(1)\n",
        "test_b.py": "def test_b(): pass\ndef test_c(): assert 0\n",
        "test_none.py": "",
        "test_d.py": "import time\ndef test_d():\n    time.sleep(1)\n",
    }.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "files").write_text("test_a.py\ntest_b.py\ntest_none.py\ntest_d.py\n")
    words = [sys.executable, "-m", "pytest", "-v", "-p", "tools.sharing", f"--share={tmp_path}", "--rootdir", tmp_path]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(words, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=170)[0] for process in processes]
    ran = re.findall(r"^test_\w\.py::(test_\w) (PASSED|FAILED)", "\n".join(outputs), re.MULTILINE)
    assert sorted(ran) == [("test_a", "PASSED"), ("test_b", "PASSED"), ("test_c", "FAILED"), ("test_d", "PASSED")]
    codes = {process.returncode for process in processes}  # 5: the other one has taken all
    assert 1 in codes and codes <= {0, 1, 5}
    assert (tmp_path / "failed").read_text() == "test_b.py::test_c\n"


ONCE = "flag = Path(f'flag{number}'); there = flag.exists(); flag.touch(); assert there"


@pytest.mark.programs
@pytest.mark.parametrize(
    ("body", "count", "environ", "code", "said"),
    [
        (ONCE, 1, {"CI": "1"}, 0, "passed alone, failed beside others (a defect of the test or the code)"),
        (ONCE, 2, {"CI": "1"}, 1, "passed alone, failed beside others (a defect of the test or the code)"),
        ("assert 0", 1, {}, 1, "failed alone too"),
    ],
    ids=["the-second-time-it-passes", "too-many-for-CI", "it-fails-twice"],
)
def test_a_test_that_fails_beside_others_is_run_again_alone(
    tmp_path: Path, body: str, count: int, environ: dict[str, str], code: int, said: str
) -> None:
    for name in ("groups.py", "sharing.py"):
        (tmp_path / "tools").mkdir(exist_ok=True)
        shutil.copy(ROOT / "tools" / name, tmp_path / "tools")
    (tmp_path / "tests").mkdir()
    (tmp_path / "before").write_text("0 1997\n")  # another tier, in which nothing was repeated
    (tmp_path / "tests/test_a.py").write_text("def test_a(): pass\n")
    (tmp_path / "tests/test_b.py").write_text(
        "from pathlib import Path\nimport pytest\n\n"
        f"@pytest.mark.parametrize('number', range({count}))\ndef test_b(number):\n    {body}\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", "import sys; from tools import groups; sys.exit(groups.run(sys.executable, 2, []))"],
        cwd=tmp_path,
        env={**{name: value for name, value in os.environ.items() if name not in ("CI", "SKYFAB_REPEATED")}, **environ},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == code, ended.stdout + ended.stderr
    assert f"{said}: tests/test_b.py::test_b[0]\n" in ended.stdout
    assert "FAILED" not in ended.stdout, "whether it has is said at the end"
    assert ("more than one in a thousand" in ended.stdout) == (count == 2 and environ == {"CI": "1"})
    assert "test_a " not in ended.stdout
