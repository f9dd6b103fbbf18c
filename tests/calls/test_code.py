"""Code: whatever a person runs, however it is started, its own functions and modules are there on the host.

Each test writes a small project and runs it as people do. A program ends by printing one line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from skyfab.lab import Lab

pytestmark = pytest.mark.lab


class Program:
    """A project in a folder of its own, and the one host that it uses."""

    def __init__(self, folder: Path, host: str, inventory: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "WHERE": host, "SKYFAB_INVENTORY": str(inventory), "PYTHONDONTWRITEBYTECODE": "1"}
        self.env.pop("PYTHONPATH", None)

    def write(self, files: Mapping[str, str]) -> None:
        for name, text in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text).lstrip("\n"))

    def start(self, *words: str, cwd: str = "", **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=self.folder / cwd,
            env={**self.env, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str, stdin: str = "", cwd: str = "", **env: str) -> tuple[int, str, str]:
        """Its exit code, and what it said on stdout and stderr."""
        with self.start(*words, cwd=cwd, **env) as running:
            out, err = running.communicate(stdin, timeout=170)
        return running.returncode, out, err

    def __call__(self, *words: str, stdin: str = "", cwd: str = "", **env: str) -> Any:
        """What the program found, once it has ended well."""
        code, out, err = self.run(*words, stdin=stdin, cwd=cwd, **env)
        assert code == 0, err
        assert out, err
        return json.loads(out.splitlines()[-1])


@pytest.fixture
def program(lab: Lab, tmp_path: Path) -> Program:
    """A project that uses a host which has none of this machine's files."""
    folder = tmp_path / "project"
    folder.mkdir()
    return Program(folder, "node1", lab.inventory)


@pytest.fixture
def here(lab: Lab, tmp_path: Path) -> Program:
    """A project that uses this machine, for what no transport has a say in."""
    folder = tmp_path / "project"
    folder.mkdir()
    return Program(folder, "local", lab.inventory)


# ---- how programs are started


# Typed into an interpreter as it is: an empty line ends a block.
BODY = """
import json, os
import skyfab as sky
HELPER
class Point:
    def __init__(self, x):
        self.x = x

@sky.function
def shift(point, by):
    return Point(double(point.x) + by)

def adder(n):
    return sky.function(lambda x: x + n)

def found(compute):
    moved = shift(Point(2), 1) >> compute
    squares = compute.map(lambda n: n * n, range(4))
    elsewhere = sky.function(os.getpid)() >> compute != os.getpid()
    return [type(moved) is Point, moved.x, adder(5)(1) >> compute, squares, elsewhere]

with sky.Compute(os.environ["WHERE"], ui="none") as compute:
    print(json.dumps(found(compute)))

"""
FOUND = [True, 5, 6, [0, 1, 4, 9], True]
DOUBLE = "def double(x):\n    return 2 * x\n"


def body(helper: str = "from helper import double") -> str:
    return BODY.replace("HELPER", helper).lstrip()


BESIDE = {"helper.py": DOUBLE}
PACKAGE = {"app/__init__.py": "", "app/helper.py": DOUBLE}
STARTS: dict[str, tuple[list[str], dict[str, str], dict[str, str]]] = {
    "a script": (["../script.py"], {"script.py": body(), **BESIDE, "other/x.py": ""}, {"cwd": "other"}),
    "a package with relative imports": (
        ["-m", "app"],
        {**PACKAGE, "app/__main__.py": body("from .helper import double")},
        {},
    ),
    "a module of a package": (
        ["-m", "app.jobs.train"],
        {**PACKAGE, "app/jobs/__init__.py": "", "app/jobs/train.py": body("from ..helper import double")},
        {},
    ),
    "code as an argument": (["-c", body()], BESIDE, {}),
    "an interpreter": (["-i", "-q"], BESIDE, {"stdin": body()}),  # reads statement after statement, without a terminal
}


@pytest.mark.parametrize(("words", "files", "options"), STARTS.values(), ids=STARTS)
def test_however_a_program_is_started(
    program: Program, words: list[str], files: dict[str, str], options: dict[str, str]
) -> None:
    """Functions, lambdas, closures and classes of __main__ are sent, with the module that they use."""
    program.write(files)
    assert program(*words, **options) == FOUND


NOTEBOOK = """
    import json, linecache, sys, types

    main = sys.modules["__main__"] = types.ModuleType("__main__")  # a kernel's, without a file

    def cell(number, text):
        name = f"/tmp/ipykernel_{number}/123456789.py"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        exec(compile(text, name, "exec"), main.__dict__)

"""


def test_cells_of_a_notebook_are_run(program: Program) -> None:
    program.write({"helper.py": DOUBLE, "kernel.py": textwrap.dedent(NOTEBOOK) + f"cell(1, {body()!r})\n"})
    assert program("kernel.py") == FOUND


def test_a_cell_that_is_run_again_means_the_new_function_and_the_new_class(program: Program) -> None:
    cells = """
        cell(1, "import os, skyfab as sky\\ncompute = sky.Compute(os.environ['WHERE'], ui='none')\\ncompute.open()")
        cell(2, "class Kind:\\n    word = 'old'\\n@sky.function\\ndef f():\\n    return helper(), Kind()")
        cell(3, "def helper():\\n    return limit\\nlimit = 1")
        cell(4, "a, kind = f() >> compute\\nsame = [type(kind) is Kind]")
        cell(5, "limit = 2")
        cell(6, "b, _ = f() >> compute")
        cell(2, "class Kind:\\n    word = 'new'\\n@sky.function\\ndef f():\\n    return -helper(), Kind()")
        cell(7, "c, kind = f() >> compute\\nsame += [type(kind) is Kind, kind.word]\\ncompute.close()")
        print(json.dumps([main.a, main.b, main.c, *main.same]))
    """
    program.write({"kernel.py": textwrap.dedent(NOTEBOOK) + textwrap.dedent(cells)})
    assert program("kernel.py") == [1, 2, -2, True, True, "new"]


# ---- what belongs to a program


def script(text: str) -> str:
    """A program that ends by printing what `find(compute)` returns."""
    head = "import json, os, sys\nfrom pathlib import Path\nimport skyfab as sky\n"
    tail = 'with sky.Compute(os.environ["WHERE"], ui="none") as compute:\n    print(json.dumps(find(compute)))\n'
    return head + textwrap.dedent(text) + tail


def test_classes_of_main_come_back_as_themselves(program: Program) -> None:
    """Enums by identity, dataclasses equal, subclasses of both worlds, exceptions caught by their class."""
    program.write(
        {
            "script.py": script("""
        import enum
        from dataclasses import dataclass
        from typing import NamedTuple

        class Color(enum.Enum):
            RED = 1

        @dataclass(frozen=True)
        class Size:
            width: int = 0

        class Large(Size):
            def area(self):
                return super().__hash__() and self.width ** 2

        class Pair(NamedTuple):
            a: int
            b: object

        class Refused(Exception):
            pass

        @sky.function
        def back(*args):
            return [Pair(type(arg).__name__, arg) for arg in args]

        @sky.function
        def refuse():
            raise Refused("no")

        def find(compute):
            (_, red), (_, size), (_, large) = pairs = back(Color.RED, Size(3), Large(4)) >> compute
            try:
                refuse() >> compute
            except Refused as error:
                caught = str(error)
            kept = [red is Color.RED, size == Size(3), type(large) is Large, type(pairs[0]) is Pair]
            return [*kept, large.area(), caught]
        """)
        }
    )
    assert program("script.py") == [True, True, True, True, 16, "no"]


def test_names_that_are_no_plain_words(program: Program) -> None:
    """Folders and data files with spaces, quotes and letters of all kinds; a link to a file; an empty module."""
    folder = program.folder / "a 'b' \"c\" ü $HOME"
    inner = Program(folder, program.env["WHERE"], Path(program.env["SKYFAB_INVENTORY"]))
    text = """
        import pack.größe

        @sky.function
        def look():
            import linked, nothing
            return pack.größe.n, linked.n, Path(pack.__file__).with_name("a b'c\\"ü.txt").read_text()

        def find(compute):
            return look() >> compute
    """
    files = {"pack/__init__.py": "", "pack/größe.py": "n = 3\n", "pack/a b'c\"ü.txt": "data", "nothing.py": ""}
    inner.write({"script.py": script(text), **files})
    program.write({"elsewhere/real.py": "n = 4\n"})
    (folder / "linked.py").symlink_to(program.folder / "elsewhere/real.py")
    assert inner("script.py") == [3, 4, "data"]


def test_a_broken_file_that_is_not_imported_does_not_matter(here: Program) -> None:
    here.write({"script.py": script("def find(compute):\n    return sky.function(lambda: 1)() >> compute\n")})
    here.write({"broken.py": "def (:", "pack/__init__.py": ""})
    (here.folder / "latin.py").write_bytes(b"x = '\xe9'")
    (here.folder / "nowhere.py").symlink_to("/no/such/file.py")
    (here.folder / "pack/data.bin").write_bytes(bytes(range(256)))
    os.mkfifo(here.folder / "pack/pipe")
    assert here("script.py") == 1


# ---- what stays here

LISTING = """
    import used

    @sky.function
    def listing():
        found = []
        for root in sys.path:
            if "/trees/" in root:
                files = [path for path in Path(root).rglob("*") if path.is_file() and path.suffix != ".pyc"]
                found += [path.relative_to(root).as_posix() for path in files]
        return sorted(found)

    def find(compute):
        return listing() >> compute
"""


def test_only_what_is_imported_is_sent(program: Program) -> None:
    """Wherever the script is, as in a home folder; .gitignore does not matter. Large data of a package stays here."""
    text = LISTING.replace("import used", "import used, pack\n    from space import named")
    program.write({"script.py": script(text), ".git/HEAD": "", ".gitignore": "*.py\n"})
    program.write({"used.py": "def late():\n    import later\n", "later.py": "", "beside.py": "", "loose.txt": "x"})
    program.write({"pack/__init__.py": "", "pack/part.py": "", "pack/small.txt": "x", "pack/.env": "token"})
    program.write({"pack/inner/__init__.py": "", "pack/outputs/a.py": "", "space/named.py": "", "space/other.py": ""})
    program.write({"pack/__pycache__/a.cpython-311.pyc": "", "private/diary.py": ""})
    (program.folder / "pack/large.bin").write_bytes(bytes(2 << 20))
    package = ["pack/__init__.py", "pack/inner/__init__.py", "pack/part.py", "pack/small.txt"]
    expected = ["later.py", *package, "script.py", "space/named.py", "used.py"]
    assert program("script.py", HOME=str(program.folder)) == expected


def test_excludes_leave_files_out(program: Program) -> None:
    text = LISTING.replace("listing() >> compute", "listing() >> other()") + "\n"
    text += """
    def other():
        image = sky.Image(excludes=["old_*.py", "/top/", "!old_b.py"])
        other.pool = sky.Compute(os.environ["WHERE"], ui="none", image=image)
        other.pool.open()
        return other.pool

    import atexit
    atexit.register(lambda: other.pool.close())
    import old_a, old_b, top.a, sub.top.a
    """
    program.write({"script.py": script(text), "old_a.py": "", "old_b.py": "", "top/a.py": "", "sub/top/a.py": ""})
    program.write({"used.py": ""})
    assert program("script.py") == ["old_b.py", "script.py", "sub/top/a.py", "used.py"]


# ---- includes


def included(*words: str, excludes: str = "()") -> str:
    """A program whose pool includes these."""
    text = script("def find(compute):\n    return sky.function(look)() >> compute\n")
    return text.replace('ui="none"', f'ui="none", image=sky.Image(includes={list(words)!r}, excludes={excludes})')


def test_includes_name_folders_files_and_modules(program: Program) -> None:
    """A folder of modules, a package, a single file, and an installed module by name, data of all kinds with them."""
    files = {
        "app/script.py": "LOOK",
        "shared/tool.py": "n = 1\n",
        "shared/table.csv": "1,2",
        "libs/pack/__init__.py": "n = 2\n",
        "libs/pack/deep/data.bin": "x",
        "libs/other.py": "",
        "one/single.py": "n = 3\n",
        "one/not_this.py": "",
        "site/site-packages/installed.py": "n = 4\n",
        "site/site-packages/suite/__init__.py": "n = 5\n",
        "site/site-packages/suite/part.py": "n = 6\n",
        "site/site-packages/unwanted.py": "",
    }
    look = """
def look():
    import importlib.util
    import tool, pack, single, installed, suite.part
    table = Path(tool.__file__).with_name("table.csv").read_text()
    data = Path(pack.__file__).parent.joinpath("deep/data.bin").read_text()
    strangers = [name for name in ("other", "not_this", "unwanted") if importlib.util.find_spec(name)]
    return tool.n, pack.n, single.n, installed.n, suite.n, suite.part.n, table, data, strangers
"""
    words = ["../shared", "../libs/pack", "../one/single.py", "installed", "suite"]
    files["app/script.py"] = included(*words).replace("def find", f"{look}\ndef find")
    program.write(files)
    path = str(program.folder / "site/site-packages")
    assert program("script.py", cwd="app", PYTHONPATH=path) == [1, 2, 3, 4, 5, 6, "1,2", "x", []]


def test_an_include_that_is_not_there_is_named(here: Program) -> None:
    here.write({"script.py": included("no_such_thing").replace("def find", "def look():\n    pass\n\ndef find")})
    code, _, err = here.run("script.py")
    assert code == 1
    assert "UsageError" in err and "no_such_thing" in err


# ---- code that changes while the program runs


def test_an_edited_module_is_used_at_once(program: Program) -> None:
    """The function's own module, one that it imports, and one that only the host imports; alone and on every rank."""
    text = """
        import jobs

        def edit(name, text):
            Path(__file__).with_name(name).write_text(text)

        def find(compute):
            found = [jobs.work() >> compute]
            edit("jobs.py", Path(jobs.__file__).read_text().replace("+ 1", "+ 100"))
            found.append(jobs.work() >> compute)
            edit("helper.py", "value = 2000\\n")
            found.append(jobs.work() >> compute)
            edit("late.py", "value = 30000\\n")
            found.append(jobs.work() >> compute)
            found += jobs.work() @ compute
            edit("late.py", "value = 40000\\n")
            found += jobs.work() @ compute
            edit("helper.py", "value = 3000\\n")
            found += compute.map(jobs.work, [()])
            return found
    """
    jobs = """
        import skyfab as sky
        import helper

        @sky.function
        def work(*args):
            import late
            return late.value + helper.value + 1
    """
    files = {"script.py": script(text), "jobs.py": jobs, "helper.py": "value = 20\n", "late.py": "value = 300\n"}
    program.write(files)
    assert program("script.py") == [321, 420, 2400, 32100, 32100, 42100, 43100]


def test_a_module_that_is_added_or_removed_while_the_program_runs(program: Program) -> None:
    text = """
        @sky.function
        def work():
            try:
                import new.part
            except ImportError as error:
                return type(error).__name__
            return new.part.value

        def find(compute):
            part = Path(__file__).parent / "new/part.py"
            found = [work() >> compute]
            part.parent.mkdir()
            part.with_name("__init__.py").touch()
            part.write_text("value = 1\\n")
            found.append(work() >> compute)
            part.unlink()
            found.append(work() >> compute)
            return found
    """
    program.write({"script.py": script(text)})
    assert program("script.py") == ["ModuleNotFoundError", 1, "ModuleNotFoundError"]


# ---- several programs


def test_two_programs_with_modules_of_the_same_name_use_one_host_at_once(lab: Lab, tmp_path: Path) -> None:
    text = """
        import common

        def find(compute):
            before = sky.function(lambda: common.value)() >> compute
            print("ready", flush=True)
            sys.stdin.readline()
            after = sky.function(lambda: common.value)() @ compute
            return [before, *after]
    """
    programs = []
    for number in (1, 2):
        program = Program(tmp_path / f"project{number}", "node1", lab.inventory)
        program.write({"script.py": script(text), "common.py": f"value = {number}\n"})
        programs.append(program.start("script.py"))
    for running in programs:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
    ends = [running.communicate("go\n", timeout=170) for running in programs]
    assert [json.loads(out) for out, _ in ends] == [[1, 1], [2, 2]], ends


# ---- what goes wrong is shown where it is


def failing(program: Program, *words: str, **options: Any) -> str:
    """What a person sees when a program dies of what happened on the host."""
    code, _, err = program.run(*words, **options)
    assert code == 1, err
    return err


def test_the_traceback_has_the_line_of_the_script(program: Program) -> None:
    program.write(
        {
            "script.py": script("""
        def inner(x):
            return 1 / x  # the line in question

        @sky.function
        def outer(x):
            return inner(x)

        def find(compute):
            outer(0) >> compute
    """)
        }
    )
    err = failing(program, "script.py")
    assert err.rstrip().endswith("ZeroDivisionError: division by zero")
    assert "return 1 / x  # the line in question" in err
    assert f'File "{program.folder / "script.py"}"' in err
    assert "in inner" in err and "on node1" in err


def test_a_module_that_is_only_installed_here_is_named_with_what_to_do(program: Program) -> None:
    program.write({"site/site-packages/only_here.py": "n = 1\n"})
    program.write(
        {
            "script.py": script(
                "import only_here\n\ndef find(compute):\n    sky.function(lambda: only_here.n)() >> compute\n"
            )
        }
    )
    err = failing(program, "script.py", PYTHONPATH=str(program.folder / "site/site-packages"))
    assert "ModuleNotFoundError: No module named 'only_here'" in err
    if sys.version_info >= (3, 11):
        assert "hint: on node1" in err and "includes" in err


@pytest.mark.parametrize("error", ["RuntimeError"])
def test_a_module_that_breaks_on_the_host_says_where(program: Program, error: str) -> None:
    line = "def broken(:" if error == "SyntaxError" else 'raise RuntimeError("at import")'
    text = "def find(compute):\n    sky.function(look)() >> compute\n\ndef look():\n    import fragile\n"
    program.write({"script.py": script(text), "fragile.py": f"{line}  # here\n"})
    err = failing(program, "script.py")
    assert error in err and f"{line}  # here" in err and "fragile.py" in err
