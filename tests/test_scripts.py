"""Shell scripts: files that shellcheck passes, that every POSIX shell can read, and that are given their values."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from skyfab._util import scripts

ROOT = Path(__file__).parents[1]
FILES = [*sorted((ROOT / "skyfab").rglob("*.sh")), *sorted((ROOT / "tools").rglob("*.sh")), ROOT / "inv"]
SENT = [path.relative_to(ROOT / "skyfab").as_posix() for path in FILES if (ROOT / "skyfab") in path.parents]

ONE_LINE = ("session/bootstrap.sh", "session/setup.sh", "ssh/container.sh")

SHELLS = {
    name: [path, *words]
    for name, program, *words in (
        ("sh", "sh"),
        ("dash", "dash"),
        ("bash", "bash", "--posix"),
        ("busybox", "busybox", "sh"),
        ("ksh", "ksh"),
        ("mksh", "mksh"),
        ("zsh", "zsh", "--emulate", "sh"),
    )
    if (path := shutil.which(program))
}


def test_every_script_passes_shellcheck() -> None:
    if shutil.which("shellcheck") is None:
        assert not os.environ.get("CI"), "CI has shellcheck"
        pytest.skip("there is no shellcheck")
    files = FILES
    said = subprocess.run(["shellcheck", "--norc", "--format=gcc", *files], capture_output=True, text=True)
    assert (said.stdout, said.returncode) == ("", 0)


def test_what_shellcheck_is_told_to_ignore_has_a_reason() -> None:
    lines = [line.strip() for path in FILES for line in path.read_text().splitlines() if "shellcheck disable" in line]
    assert lines
    assert [line for line in lines if not re.fullmatch(r"# shellcheck disable=SC\d{4} # .{10,}", line)] == []


@pytest.mark.parametrize("shell", SHELLS.values(), ids=SHELLS)
def test_every_shell_can_read_what_is_sent(shell: Sequence[str]) -> None:
    """Without comments and indentation, and as one line where it is sent so."""
    for path in SENT:
        text = scripts.read(path)
        for form in (text, scripts.one_line(text)) if path in ONE_LINE else (text,):
            done = subprocess.run([*shell, "-n"], input=form, capture_output=True, text=True)
            assert done.returncode == 0, (path, done.stderr)


def test_what_no_host_needs_is_not_sent() -> None:
    """Nor is anything else changed: what is left are the lines of the file."""
    for path in SENT:
        text = scripts.read(path)
        kept = [line.strip() for line in (ROOT / "skyfab" / path).read_text().splitlines()]
        assert text.splitlines() == [line for line in kept if line and not line.startswith("#")]


@pytest.mark.parametrize("shell", SHELLS.values(), ids=SHELLS)
def test_values_arrive_as_they_are(shell: Sequence[str]) -> None:
    hostile = ["", "two words", "it's", '"$HOME" `id` \\n', "a\nb\n", "*", "-n", "ünï"]
    script = scripts.given(*hostile, first=hostile[3], second=7) + 'for x in "$first" "$second" "$@"; do say "$x"; done'
    say = "say() { printf '%s=END=' \"$1\"; }\n"
    done = subprocess.run([*shell, "-c", say + script, "x", "y"], capture_output=True, text=True, check=True)
    assert done.stdout.split("=END=")[:-1] == [hostile[3], "7", *hostile]


JOINED = """
f() {
    x=$(echo "$1")
    if test "$x" = a ||
        test "$x" = b; then
        echo first
    else
        case $x in
            c) echo second;;
            d|e)
                echo third
                ;;
            *) ;;
        esac
    fi
}
for y in a b c d e f; do
    f "$y"
done
g() { echo "$(f "$1")"; }
g a && {
    echo end
}
"""


@pytest.mark.parametrize("shell", SHELLS.values(), ids=SHELLS)
def test_lines_that_are_joined_do_the_same(shell: Sequence[str]) -> None:
    line = scripts.one_line("".join(f"{line.strip()}\n" for line in JOINED.strip().splitlines()))
    assert "\n" not in line
    said = [subprocess.run([*shell, "-c", text], capture_output=True, text=True).stdout for text in (JOINED, line)]
    assert said == ["first\nfirst\nsecond\nthird\nthird\nfirst\nend\n"] * 2


LOOKS_LIKE_SHELL = re.compile(r"; then\b|; do\b|^ *(fi|done|esac)\b|\bexit 1\b", re.MULTILINE)


def shell_texts(tree: ast.AST) -> set[int]:
    """The lines of strings that look like shell scripts, docstrings aside: several lines, and words of a shell."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    joined = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    inner = {id(part) for node in joined for part in node.values}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Constant, ast.JoinedStr)) and id(node) not in docstrings | inner:
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            text = "".join(str(part.value) for part in parts if isinstance(part, ast.Constant)).strip()
            if "\n" in text and LOOKS_LIKE_SHELL.search(text):
                found.add(node.lineno)
    return found


def test_a_script_in_a_string_is_noticed() -> None:
    assert shell_texts(ast.parse('x = """\nfor p in *; do\necho $p\ndone"""')) == {1}
    assert shell_texts(ast.parse('x = f"""\nmkdir {y} || exit 1\ncd {y}"""')) == {1}
    assert shell_texts(ast.parse('def f():\n    """Runs.\n\n    if a; then b; fi\n    """\n')) == set()
    assert shell_texts(ast.parse("x = 'if test -d a; then rm -rf a; fi'")) == set()


def test_no_module_has_a_script_in_a_string() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): lines
        for path in sorted((ROOT / "skyfab").rglob("*.py"))
        if (lines := shell_texts(ast.parse(path.read_text())))
    }
    assert found == {}
