"""`skyfab run` on hosts without a route out: packages of options, scripts and projects; variables; [tool.skyfab]."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from stage.index import Index, make_source
from stage.projects import inventory, skyfab
from stage.spot import until

import skyfab as sky
from skyfab.cli.run_environment import ProjectSettings, image_of, plugins_of, read_file, variables_of
from skyfab.cli.run_options import ImageOptions
from skyfab.env import uv
from skyfab.lab import Lab

pytestmark = pytest.mark.usefixtures("world")
SCRIPT = "import shelf, book, os\nprint(shelf.version, book.version, os.environ.get('WORD'))\n"
BLOCK = '# /// script\n# dependencies = ["shelf"]\n# ///\n'


@pytest.fixture
def app(tmp_path: Path, index: Index) -> Path:
    """A project with a script that needs two packages of an index."""
    index.add("shelf", "1.0", requires=["book"])
    index.add("book", "1.0")
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    return folder


@pytest.fixture
def run(app: Path, fresh: Callable[..., list[sky.Host]]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``run("--pip=shelf", "train.py")`` in the project's folder, on a host that has none of the packages."""
    file = inventory(app.parent / "inventory.toml", [*fresh("openssh", 1, name="node1")])

    def ran(*words: str) -> subprocess.CompletedProcess[str]:
        return skyfab(app, "run", "--hosts=all", *words, inventory=file, timeout=170)

    return ran


def write(path: Path, text: str) -> None:
    path.write_text(text)


def pyproject(app: Path, *dependencies: str, more: str = "") -> None:
    listed = ", ".join(f'"{one}"' for one in dependencies)
    write(
        app / "pyproject.toml",
        f'[project]\nname = "app"\nversion = "0"\nrequires-python = ">=3.10"\ndependencies = [{listed}]\n{more}',
    )


Run = Callable[..., subprocess.CompletedProcess[str]]


# ---- where packages come from


def test_packages_of_options(run: Run) -> None:
    ran = run("--pip=shelf", "--env=WORD=two words", "train.py")
    assert ran.stdout == "node1[0] 1.0 1.0 two words\n", ran.stderr
    assert "environment: shelf, from the command line\n" in ran.stderr


def test_a_command_finds_the_programs_of_its_environment(run: Run, index: Index) -> None:
    info = "greeter-1.0.dist-info/entry_points.txt"
    code = "import sys\n\ndef main():\n    print('greeter', *sys.argv[1:])\n"
    scripts = "[console_scripts]\ngreeter = greeter:main\n"
    index.add("greeter", "1.0", files={"greeter/__init__.py": code, info: scripts})
    ran = run("--pip=greeter", "--", "greeter", "of rank {rank}")
    assert ran.stdout == "node1[0] greeter of rank 0\n", ran.stderr
    ran = run("--pip=greeter", "-m", "greeter")
    assert "No module named greeter.__main__" in ran.stderr  # it is there


def test_a_line_names_what_was_built_from_source(run: Run, app: Path, index: Index) -> None:
    index.add("lamp", "1.0", requires=["stone"])
    index.add_source("stone", "2.0")
    write(app / "train.py", "import lamp, stone\n")
    ran = run("--pip=lamp", "train.py")
    assert ran.returncode == 0, ran.stderr
    assert "node1: built from source on this machine: stone 2.0\n" in ran.stderr


def test_a_line_names_what_is_older_than_the_newest_and_why(run: Run, app: Path, index: Index) -> None:
    for version, options in (("1.0", {}), ("2.0", {"python": ">=3.99"})):
        index.add("lamp", version, **options)
        index.add("bulb", version)
    write(app / "train.py", "import lamp\n")
    ran = run("--pip=lamp,bulb", "train.py")
    assert ran.returncode == 0, ran.stderr
    assert "node1: older than the newest version: lamp 1.0 (lamp==2.0 requires Python >=3.99)\n" in ran.stderr


BOARD = """
import argparse, http.server

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--logdir")
    parser.add_argument("--port", type=int)
    given = parser.parse_args()
    http.server.HTTPServer(("127.0.0.1", given.port), http.server.SimpleHTTPRequestHandler).handle_request()
"""


@pytest.mark.slow
def test_exec_and_ssh_have_the_environment_and_the_modules_of_the_last_run(run: Run, app: Path, index: Index) -> None:
    """TensorBoard is started as docs/forward.md does it; this one ends after a request."""
    info = "tensorboard-1.0.dist-info/entry_points.txt"
    scripts = "[console_scripts]\ntensorboard = tensorboard:main\n"
    index.add("tensorboard", "1.0", files={"tensorboard/__init__.py": BOARD, info: scripts})
    settings = '[tool.skyfab]\nsetup = "export LEVEL=7"\nenv = { WORD = "two words" }\n'
    pyproject(app, "shelf", "tensorboard", more=settings)
    for path in ("src/own_app/__init__.py", "jobs/lib.py"):
        (app / path).parent.mkdir(parents=True)
        write(app / path, f"name = {path!r}\n")
    write(app / "jobs" / "train.py", "import own_app, lib\n")

    def typed(*words: str) -> subprocess.CompletedProcess[str]:
        return skyfab(app, *words, inventory=app.parent / "inventory.toml")

    not_yet = typed("exec", "node1", "--", "echo $WORD")
    assert (not_yet.stdout, not_yet.stderr) == ("node1 two words\n", "")
    not_found = typed("exec", "node1", "--", "tensorboard")
    missing = "the environment of this project has not been built yet; to build it: skyfab prepare --hosts=node1"
    assert missing in not_found.stderr
    ran = run("jobs/train.py")
    assert ran.returncode == 0, ran.stderr
    look = (
        "cd / && python -c 'import shelf, own_app as o, lib; print(shelf.version, o.name, lib.name)'; echo $WORD $LEVEL"
    )
    seen = ["1.0 src/own_app/__init__.py jobs/lib.py", "two words 7"]
    by_exec = typed("exec", "node1", "--", look)
    assert (by_exec.stdout.splitlines(), by_exec.stderr) == ([f"node1 {line}" for line in seen], "")
    by_ssh = typed("ssh", "node1", "--", look)
    assert by_ssh.stdout.splitlines() == seen, by_ssh.stderr
    mistyped = typed("exec", "node1", "--", "tensorbored")
    assert "not found" in mistyped.stderr
    assert "built" not in mistyped.stderr
    assert run("--sync", "jobs/train.py").returncode == 0
    write(app / "src" / "own_app" / "__init__.py", "name = 'edited'\n")
    assert run("jobs/train.py").returncode == 0
    edited = typed("exec", "node1", "--", "python -c 'import own_app; print(own_app.name)'")
    assert edited.stdout == "node1 edited\n", "the modules that the last run sent, not what --sync left there before"
    bare = typed("exec", "--no-env", "node1", "--", "command -v tensorboard; echo _$WORD$PYTHONPATH$VIRTUAL_ENV")
    assert bare.stdout == "node1 _\n", bare.stderr
    page = (Path(__file__).parents[2] / "docs" / "forward.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith("$ skyfab exec node1 ")]
    started = typed(*shlex.split(line)[2:])
    assert (started.returncode, started.stdout, started.stderr) == (0, "", "")
    fetch = """python -c 'import urllib.request as r; print(r.urlopen("http://127.0.0.1:6006").status)'"""
    until(lambda: typed("exec", "node1", "--", fetch).stdout == "node1 200\n", "the board")


def test_packages_of_a_script(run: Run, app: Path) -> None:
    pyproject(app, "nothing-like-it")
    write(app / "train.py", BLOCK + SCRIPT)
    ran = run("train.py")
    assert ran.stdout == "node1[0] 1.0 1.0 None\n", ran.stderr
    assert "environment: shelf, from train.py (PEP 723)\n" in ran.stderr


@pytest.mark.slow
def test_packages_of_a_project_with_its_lock(run: Run, app: Path, index: Index) -> None:
    pyproject(app, "shelf")
    uv.run_uv("lock", "--python", sys.executable, cwd=app)
    index.add("book", "2.0")
    ran = run("train.py")
    assert ran.stdout == "node1[0] 1.0 1.0 None\n", ran.stderr
    assert "environment: shelf, from pyproject.toml with uv.lock\n" in ran.stderr
    (app / "uv.lock").unlink()
    ran = run("train.py")
    assert ran.stdout == "node1[0] 1.0 2.0 None\n", ran.stderr
    assert "environment: shelf, from pyproject.toml\n" in ran.stderr


def test_packages_of_a_file_of_requirements(run: Run, app: Path, index: Index) -> None:
    """One of them is only a source."""
    index.add_source("stone", "3.0")
    write(app / "requirements.txt", "shelf\nstone\n")
    write(app / "train.py", SCRIPT + "import stone; print(stone.version)\n")
    ran = run("train.py")
    assert ran.stdout == "node1[0] 1.0 1.0 None\nnode1[0] 3.0\n", ran.stderr
    assert "environment: shelf, stone, from requirements.txt\n" in ran.stderr


def test_packages_of_a_lock(run: Run, app: Path, index: Index) -> None:
    index.add("book", "2.0")
    write(app / "wanted.in", "shelf\nbook==1.0")
    lock = uv.run_uv("pip", "compile", "-q", "--format=pylock.toml", "--generate-hashes", "wanted.in", cwd=app)
    write(app / "pylock.toml", lock)
    ran = run("--lock=pylock.toml", "train.py")
    assert ran.stdout == "node1[0] 1.0 1.0 None\n", ran.stderr


def test_packages_of_the_project_settings(run: Run, app: Path) -> None:
    """They take the place of the project's, and options that of theirs; the script's own come before both."""
    settings = '[tool.skyfab]\npip = ["shelf"]\nsetup = "export WORD=set"\n'
    pyproject(app, "nothing-like-it", more=settings)
    ran = run("train.py")
    assert ran.stdout == "node1[0] 1.0 1.0 set\n", ran.stderr
    assert "environment: shelf, from [tool.skyfab]\n" in ran.stderr


def test_a_package_of_the_project_itself_is_sent(run: Run, app: Path) -> None:
    make_source(app, "app", "0", requires=["shelf"])
    (app / "src" / "app").mkdir(parents=True)
    write(app / "src" / "app" / "__init__.py", "word = 'inside'\n")
    (app / "jobs").mkdir()
    write(app / "jobs" / "job.py", "import app, shelf\nprint(app.word, shelf.version)\n")
    ran = run("jobs/job.py")
    assert ran.stdout == "node1[0] inside 1.0\n", ran.stderr


def test_without_packages_the_hosts_own_python_is_used(run: Run, app: Path) -> None:
    write(app / "train.py", "import sys; print(sys.prefix)\n")
    ran = run("train.py")
    assert ran.returncode == 0, ran.stderr
    assert "environment:" not in ran.stderr
    assert "/envs/" not in ran.stdout
    write(app / "requirements.txt", "nothing-like-it\n")
    ran = run("--no-project", "train.py")
    assert ran.returncode == 0, ran.stderr


def test_a_missing_module_names_the_option_that_adds_it(run: Run, app: Path, index: Index) -> None:
    """The packages of the project stay."""
    index.add("lamp", "1.0")
    pyproject(app, "shelf")
    write(app / "train.py", f"{SCRIPT}import lamp.inner\n")
    ran = run("--ranks=1", "train.py")
    assert ran.returncode == 1
    assert "on node1: --with=lamp installs it" in ran.stderr
    assert "Image(" not in ran.stderr
    write(app / "train.py", f"{SCRIPT}import lamp\nprint(lamp.version)\n")
    ran = run("--ranks=1", "--with=lamp", "train.py")
    assert ran.stdout == "node1[0] 1.0 1.0 None\nnode1[0] 1.0\n", ran.stderr
    assert "environment: shelf, lamp, from pyproject.toml and --with\n" in ran.stderr


def test_prepare_builds_what_run_uses(run: Run, app: Path, index: Index) -> None:
    index.add("lamp", "1.0")
    pyproject(app, "shelf", "book")
    write(app / "train.py", "import shelf\n")
    for more in ((), ("--with=lamp,shelf",)):
        made = skyfab(app, "prepare", *more, inventory=app.parent / "inventory.toml", timeout=170)
        assert made.returncode == 0, made.stderr
        assert f"environment: shelf, book{', lamp' if more else ''}, from pyproject.toml" in made.stderr
    index.close()
    for more in ((), ("--with=lamp,shelf",)):
        ran = run(*more, "train.py")
        assert ran.returncode == 0, ran.stderr


def test_prepare_where_the_inventory_names_a_python(run: Run, app: Path, lab: Lab) -> None:
    """It has what the project needs, so nothing is built; packages that are named are installed beside it, with it."""
    pyproject(app, "nothing-like-it")
    file = app.parent / "inventory.toml"
    write(file, f'{file.read_text().replace("python = ", "# ")}python = "{lab.hosts[0].python}"\n')
    made = skyfab(app, "prepare", inventory=file)
    assert made.returncode == 0, made.stderr
    assert re.search(r"^node1 +– +– +[\d.]+ +ready$", made.stdout, re.MULTILINE), made.stdout
    made = skyfab(app, "prepare", "--pip=shelf", inventory=file)
    assert re.search(r"^node1 +[0-9a-f]{12} +2 +[\d.]+ +ready$", made.stdout, re.MULTILINE), made
    write(app / "train.py", "import shelf, sys\nprint(sys.prefix != sys.base_prefix, sys._base_executable)\n")
    ran = run("--pip=shelf", "train.py")
    word, base = ran.stdout.removeprefix("node1[0] ").split()
    assert (word, os.path.realpath(base)) == ("True", os.path.realpath(lab.hosts[0].python)), ran
    write(file, file.read_text().replace(lab.hosts[0].python, "/nowhere/python3"))
    made = skyfab(app, "prepare", "--pip=book", inventory=file)
    assert made.returncode == 3 and "/nowhere/python3" in made.stderr


def test_a_project_on_this_machine_uses_this_python(app: Path) -> None:
    pyproject(app, "nothing-like-it", more='[tool.skyfab]\nranks = 1\nenv = { WORD = "x" }\nworkdir = "temp"\n')
    write(app / "train.py", "import os, sys\nprint(sys.prefix, os.environ['WORD'], os.getcwd())\n")
    ran = skyfab(app, "run", "train.py")
    place, prefix, word, folder = ran.stdout.split()
    assert (place, prefix, word) == ("local[0]", sys.prefix, "x")
    assert folder != str(app)


def test_hosts_of_the_project_settings(app: Path, run: Run) -> None:
    """Options take their place; those of hosts leave the inventory."""
    write(app / "train.py", "print('here')\n")
    pyproject(app, more='[tool.skyfab]\nhosts = "node1"\ninventory = "../inventory.toml"\nranks = 2\n')
    assert sorted(skyfab(app, "run", "train.py").stdout.splitlines()) == ["node1[0] here", "node1[1] here"]
    assert skyfab(app, "run", "--hosts=!local", "--ranks=1", "train.py").stdout == "node1[0] here\n"
    assert skyfab(app, "run", "--hosts=local", "--ranks=1", "train.py").stdout == "local[0] here\n"


def test_a_detached_run_has_the_name_that_it_is_given(app: Path) -> None:
    write(app / "job.py", "print('done')\n")
    ran = skyfab(app, "run", "--ranks=1", "--detach", "--name=at-dusk", "job.py")
    assert ran.returncode == 0, ran.stderr
    followed = skyfab(app, "attach", "at-dusk", "--hosts=local")
    assert "at-dusk: done" in followed.stderr, followed.stderr


# ---- choosing, without hosts

HOST = sky.Host(name="node1")


def chosen(app: Path, given: ImageOptions = ImageOptions(), hosts: tuple[sky.Host, ...] = (HOST,)) -> sky.Image:  # noqa: B008
    script = app / "train.py"
    return image_of(script, given, ProjectSettings.of(script), hosts, no_project=False)


def test_what_comes_before_what(app: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(app / "requirements.txt", "of-file\n")
    assert chosen(app).pip == ("of-file",)
    pyproject(app, "of-project")
    assert chosen(app).pip == ("of-project",)
    pyproject(app, "of-project", more='[tool.skyfab]\npip = "of-settings"\nsetup = "true"\n')
    assert chosen(app) == sky.Image(pip=["of-settings"], setup="true")
    write(app / "train.py", BLOCK)
    assert chosen(app) == sky.Image(pip=["shelf"], setup="true")
    assert chosen(app, ImageOptions(pip=["of-option"])) == sky.Image(pip=["of-option"], setup="true")
    assert [line.partition(", from ")[2] for line in capsys.readouterr().err.splitlines()] == [
        *("app/requirements.txt", "app/pyproject.toml", "[tool.skyfab]", "app/train.py (PEP 723)", "the command line")
    ]


@pytest.fixture(autouse=True)
def above(app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(app.parent)


def test_options_that_name_no_packages_change_what_is_found(app: Path) -> None:
    pyproject(app, "shelf")
    image = chosen(app, ImageOptions(install="push", index=["https://i.example=shelf"]))
    assert (image.pip, image.install) == (("shelf",), "push")
    assert image.pip_indexes == (sky.PipIndex("https://i.example", ("shelf",)),)


def test_with_adds_to_what_is_found(app: Path, tmp_path: Path) -> None:
    more = ImageOptions(with_=["lamp>=1,<2,desk"])
    assert chosen(app, more).pip == ("lamp>=1,<2", "desk")
    pyproject(app, "shelf")
    assert chosen(app, more).pip == ("shelf", "lamp>=1,<2", "desk")
    local = sky.Host(name="local", transport="local")
    assert chosen(app, more, hosts=(local,)).pip == ("shelf", "lamp>=1,<2", "desk"), "as uv run --with"
    assert chosen(app, ImageOptions(pip=["book"], with_=["desk"])).pip == ("book", "desk")
    with pytest.raises(sky.UsageError, match=r"--with=desk adds nothing to pylock\.toml"):
        chosen(app, ImageOptions(lock="pylock.toml", with_=["desk"]))


def test_hosts_whose_python_is_chosen_are_used_as_they_are(app: Path) -> None:
    pyproject(app, "shelf")
    own = sky.Host(name="node2", python="/usr/bin/python3")
    assert chosen(app, hosts=(own, sky.Host(name="local", transport="local"))) == sky.Image()
    assert chosen(app, hosts=(own, HOST)).pip == ("shelf",)
    write(app / "train.py", BLOCK)
    assert chosen(app, hosts=(own,)).pip == ("shelf",), "a script says what it needs wherever it runs"


# ---- variables


def test_a_file_of_variables(tmp_path: Path) -> None:
    file = tmp_path / ".env"
    write(
        file,
        "\ufeff# a comment\n\nPLAIN = value with spaces   # and a comment\nHASH=a#b\n"
        "export SINGLE='$HOME \\n # not one'  # one\r\n"
        'DOUBLE="line\\none \\"quoted\\" \\$HOME \\\\ #"\nEMPTY=\nNONE=""\n  LINES="a\nb"\nLAST=x',
    )
    assert read_file(file) == {
        "PLAIN": "value with spaces",
        "HASH": "a#b",
        "SINGLE": "$HOME \\n # not one",
        "DOUBLE": 'line\none "quoted" $HOME \\ #',
        "EMPTY": "",
        "NONE": "",
        "LINES": "a\nb",
        "LAST": "x",
    }


@pytest.mark.parametrize(
    "line", ["no variable", "1A=x", 'A="secret', "A='secret", 'A="secret" more', "=secret", "A-B=secret"]
)
def test_a_line_that_sets_nothing_is_named_without_its_content(tmp_path: Path, line: str) -> None:
    file = tmp_path / ".env"
    write(file, f"GOOD=1\n{line}\n")
    with pytest.raises(sky.UsageError, match="line 2 is not valid") as raised:
        read_file(file)
    assert "secret" not in str(raised.value)


def test_variables_override_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first", "second"):
        write(tmp_path / name, f"A={name}\nB={name}\n{name.upper()}=1\n")
    settings = ProjectSettings(env={"A": "settings", "C": "settings"}, env_file=(str(tmp_path / "first"),))
    monkeypatch.setenv("FROM_HERE", "here")
    found = variables_of(["A=given=x", "FROM_HERE"], [str(tmp_path / "second")], settings)
    assert found == {"A": "given=x", "B": "second", "C": "settings", "FIRST": "1", "SECOND": "1", "FROM_HERE": "here"}
    with pytest.raises(sky.UsageError, match="--env=NOT_SET_HERE: not set in this shell"):
        variables_of(["NOT_SET_HERE"], [], settings)
    with pytest.raises(sky.UsageError, match="--env: invalid variable name: '1A'"):
        variables_of(["1A=x"], [], settings)
    with pytest.raises(sky.UsageError, match="cannot read"):
        variables_of([], [str(tmp_path / "none")], settings)


def test_plugins_by_name() -> None:
    assert [type(one).__name__ for one in plugins_of(["torch", "huggingface", "torch"])] == ["Torch", "HuggingFace"]
    with pytest.raises(sky.UsageError, match="unknown plugin 'troch'") as raised:
        plugins_of(["troch"])
    assert raised.value.hint == "did you mean torch?"


# ---- [tool.skyfab]


def test_all_settings_of_a_project(app: Path) -> None:
    text = """
hosts = ["node1", "node[2-4]"]
inventory = "hosts.toml"
ranks = 2
workdir = "/data"
pip = ["numpy"]
index = "https://i.example=numpy"
requirements = "more.txt"
apt = ["git"]
install = "push"
python = "3.11"
lock = "pylock.toml"
env = { A = "1" }
env-file = ".env"
setup = '''
module load cuda
'''
plugins = ["torch"]
"""
    pyproject(app, more=f"[tool.skyfab]{text}")
    (app / "jobs").mkdir()
    write(app / "jobs" / "job.py", "")
    write(app / "jobs" / "pyproject.toml", "[tool.other]\n")
    assert ProjectSettings.of(app / "jobs" / "job.py") == ProjectSettings(
        hosts="node1,node[2-4]",
        inventory=str(app / "hosts.toml"),
        ranks=2,
        workdir="/data",
        env={"A": "1"},
        env_file=(str(app / ".env"),),
        setup="module load cuda",
        plugins=("torch",),
        image=ImageOptions(
            pip=("numpy",),
            index=("https://i.example=numpy",),
            requirements=str(app / "more.txt"),
            apt=("git",),
            install="push",
            python="3.11",
            lock=str(app / "pylock.toml"),
        ),
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("rank = 2", ': unknown key "rank"'),
        ("ranks = 0", " ranks: "),
        ('env = ["A"]', " env: "),
        ("pip = 3", " pip: "),
        ('setup = ["a"]', " setup: "),
    ],
)
def test_a_mistake_in_the_settings_is_named(app: Path, line: str, said: str) -> None:
    pyproject(app, more=f"[tool.skyfab]\n{line}\n")
    with pytest.raises(sky.UsageError, match=rf"pyproject\.toml: \[tool\.skyfab\]{said}"):
        ProjectSettings.of(app / "train.py")
    write(app / "pyproject.toml", "tool.skyfab = 3\n")
    with pytest.raises(sky.UsageError, match=r"\[tool.skyfab\] must be a table, not an integer"):
        ProjectSettings.of(app / "train.py")


def test_a_mistake_in_the_settings_ends_the_command(app: Path) -> None:
    pyproject(app, more="[tool.skyfab]\nhost = 'node1'\n")
    ran = skyfab(app, "run", "train.py")
    assert ran.returncode == 2
    assert "did you mean hosts?" in ran.stderr
