"""Which trials a sweep has, by what was typed or by a file, and the names of their folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyfab.cli.sweep import names_of, trials_of
from skyfab.errors import UsageError


def test_a_grid_has_every_combination_and_each_word_is_as_it_was_typed() -> None:
    found = trials_of(["--lr=1e-3,1e-4", "seed=1..3", "--fast", "name=a b"])
    assert len(found) == 6
    assert found[0] == ("--lr=1e-3", "seed=1", "--fast", "name=a b")
    assert found[-1] == ("--lr=1e-4", "seed=3", "--fast", "name=a b")


@pytest.mark.parametrize(
    ("pattern", "values"),
    [
        ("seed=4..4", ["seed=4"]),
        ("x=-2..0", ["x=-2", "x=-1", "x=0"]),
        ("x=1..2,7", ["x=1", "x=2", "x=7"]),
        ("layers=[64,64],[128]", ["layers=[64,64]", "layers=[128]"]),
        ("layers=[[64,64],[128,128]],{a,(b,c)}", ["layers=[[64,64],[128,128]]", "layers={a,(b,c)}"]),
        ("f=g(1,(2,3)),0", ["f=g(1,(2,3))", "f=0"]),
        ("range=[0,1),(1,2]", ["range=[0,1)", "range=(1,2]"]),
        ("data=../a,../../b", ["data=../a", "data=../../b"]),
        ("a=b=c,d", ["a=b=c", "a=d"]),
        ("a,b", ["a,b"]),
        ("data=..", ["data=.."]),
        ("x=0..10", [f"x={number}" for number in range(11)]),
        ("x=08..10", ["x=08", "x=09", "x=10"]),
    ],
)
def test_what_a_pattern_stands_for(pattern: str, values: list[str]) -> None:
    assert trials_of([pattern]) == [(value,) for value in values]


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ([], "no trials"),
        (["lr="], "no values in 'lr='"),
        (["lr=1,,2"], "an empty value"),
        (["seed=5..1"], r"5\.\.1 gives no trials"),
        (["lr=0.1..0.5"], "whole numbers"),
        (["lr=1.."], r"1\.\.: ranges need whole numbers"),
        (["lr=..3"], "whole numbers"),
        (["x=a..c"], r"a\.\.c: ranges need whole numbers"),
        (["seed=1..100000000000000000000"], "more than 10,000 trials"),
        (["seed=1..200", "lr=1..200"], "40,000 trials: a sweep has at most 10,000"),
        (["lr=1,1"], "the same trial twice: lr=1"),
        (["--lr", "0.1,0.2"], "--lr 0.1,0.2 is one trial"),
    ],
)
def test_what_gives_no_trial_or_too_many_is_an_error(patterns: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        trials_of(patterns)
    assert caught.value.hint


def test_a_file_has_a_line_for_each_trial(tmp_path: Path) -> None:
    file = tmp_path / "grid"
    file.write_text("# both\ntag=exp#3 color=#ff0000 'a # b' \"c\"#d # e\n")
    assert trials_of([], str(file)) == [("tag=exp#3", "color=#ff0000", "a # b", "c#d")]
    file.write_text("# both\nlr=1e-3 name='a, b'\n\n--lr 1e-4 # the small one\n")
    assert trials_of([], str(file)) == [("lr=1e-3", "name=a, b"), ("--lr", "1e-4")]
    both = trials_of(["seed=1..2"], str(file))
    assert both[:2] == [("lr=1e-3", "name=a, b", "seed=1"), ("lr=1e-3", "name=a, b", "seed=2")]
    assert len(both) == 4


def test_names_are_safe_and_say_what_distinguishes_a_trial() -> None:
    words = ["name=../../etc,a/b,a_b", "--text=x y", "--note=" + "long" * 100, "seed=1..2"]
    trials = trials_of(words)
    names = names_of(trials)
    assert names[0] == "name=.._.._etc-seed=1"
    assert len(names) == len(trials) == 6
    assert not any("/" in name or " " in name for name in names)
    assert max(map(len, names_of([("a=" + "x" * 400,), ("a=y",)]))) < 110
    assert names_of([("only=1",)]) == ["only=1"]
