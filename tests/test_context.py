"""context: what a function sees of its place, its share of the data and its voice, inside a call and outside."""

from __future__ import annotations

import array
import contextlib
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import skyfab as sky
from skyfab import context
from skyfab.context import InstanceInfo, enter, instance_info, shard

try:  # here and not in the test: it keeps files open from its first import on
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins outside a call, and leaves no rank behind."""
    monkeypatch.setattr(context, "_current", None)


def become(rank: int, world_size: int, **more: Any) -> None:
    enter(InstanceInfo(rank=rank, world_size=world_size, **more))


# ---- the place


def test_outside_a_call_there_is_one_rank_on_one_node() -> None:
    info = instance_info()
    assert (info.node, info.total_nodes, info.rank, info.world_size) == (0, 1, 0, 1)
    assert (info.local_rank, info.local_world_size, info.peers, info.is_head) == (0, 1, (), True)
    assert info.hostname == os.uname().nodename
    for name in ("head_addr", "head_port", "accelerators", "total_accelerators", "job_id"):  # the others in API.md
        assert hasattr(info, name)
    with pytest.raises(AttributeError):
        info.rank = 3  # type: ignore[misc]


@pytest.mark.parametrize("rank", [0, 3])
def test_inside_a_call_it_is_that_of_the_rank(rank: int) -> None:
    become(rank, 4, node=1, total_nodes=2, peers=("10.0.0.1", "10.0.0.2"))
    info = instance_info()
    assert (info.rank, info.world_size, info.node, info.total_nodes) == (rank, 4, 1, 2)
    assert (info.is_head, info.peers) == (rank == 0, ("10.0.0.1", "10.0.0.2"))


# ---- shard


def test_outside_a_call_shard_returns_its_input() -> None:
    data, more = [1, 2, 3], (4, 5, 6)
    assert shard(data) is data
    first, second = shard(data, more, shuffle=True, drop_last=True)
    assert first is data
    assert second is more


@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_of_pandas_are_taken_by_position(shuffle: bool) -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"a": range(6)}, index=[5.0, 4.0, 3.0, 2.0, 1.0, 0.0])
    become(1, 2)
    expected = shard(list(range(6)), shuffle=shuffle)
    assert [list(one) for one in (shard(table, shuffle=shuffle)["a"], shard(table["a"], shuffle=shuffle))] == [
        expected,
        expected,
    ]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_deque_stays_one(shuffle: bool) -> None:
    become(1, 2)
    share = shard(deque(range(6), maxlen=8), shuffle=shuffle)
    assert share == deque(shard(list(range(6)), shuffle=shuffle))
    assert share.maxlen == 8


@pytest.mark.parametrize("data", [{"a": 1}, {1, 2}, iter([1])], ids=["dict", "set", "iterator"])
def test_what_has_no_order_is_refused(data: Any) -> None:
    with pytest.raises(
        TypeError, match=r"shard\(\) takes sequences, arrays, tensors and data frames, not (dict|set|list)"
    ):
        shard(data)


def all_shares(data: Any, world_size: int, **options: Any) -> list[Any]:
    shares = []
    for rank in range(world_size):
        become(rank, world_size)
        shares.append(shard(data, **options))
    return shares


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 60), st.integers(1, 9), st.booleans(), st.booleans(), st.integers(0, 5))
def test_all_ranks_together_have_everything_once(length: int, world: int, shuffle: bool, drop: bool, seed: int) -> None:
    """Nothing twice, nothing lost but what drop_last drops, and shares that differ by at most one."""
    before = context._current
    try:
        shares = all_shares(list(range(length)), world, shuffle=shuffle, drop_last=drop, seed=seed)
    finally:
        context._current = before
    everything = [x for share in shares for x in share]
    assert len(set(everything)) == len(everything)
    sizes = {len(share) for share in shares}
    if drop:
        assert sizes == {length // world}
    else:
        assert sorted(everything) == list(range(length))
        assert max(sizes) - min(sizes) <= 1


def test_shuffling_depends_on_the_seed_and_on_nothing_else() -> None:
    data = list(range(100))
    first = all_shares(data, 4, shuffle=True, seed=1)
    assert first == all_shares(data, 4, shuffle=True, seed=1)
    assert first != all_shares(data, 4, shuffle=True, seed=2)
    assert first != all_shares(data, 4)


def test_several_arguments_stay_aligned() -> None:
    for rank in range(3):
        become(rank, 3)
        for shuffle in (False, True):
            x, y = shard(list(range(10)), tuple(str(n) for n in range(10)), shuffle=shuffle)
            assert [str(n) for n in x] == list(y)
            assert type(x) is list
            assert type(y) is tuple


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    "make",
    [list, tuple, str, str.encode, lambda text: bytearray(text, "ascii"), lambda text: array.array("b", text.encode())],
    ids=["list", "tuple", "str", "bytes", "bytearray", "array"],
)
def test_a_share_has_the_type_of_its_data(make: Callable[[Any], Any], shuffle: bool, drop_last: bool) -> None:
    data = make("abcdefghij")
    become(1, 3)
    share = shard(data, shuffle=shuffle, drop_last=drop_last)
    assert type(share) is type(data)
    assert len(share) == 3


@pytest.mark.torch
@pytest.mark.skipif(torch is None, reason="needs torch")
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_numpy_arrays_and_tensors_keep_their_type_and_rows(shuffle: bool, drop_last: bool) -> None:
    np = pytest.importorskip("numpy")
    become(1, 3)
    rows = np.arange(20).reshape(10, 2)
    options = {"shuffle": shuffle, "drop_last": drop_last}
    a, t, plain = shard(rows, torch.from_numpy(rows), list(range(10)), **options)
    assert type(a) is np.ndarray
    assert type(t) is torch.Tensor
    assert a.tolist() == t.tolist() == [[2 * n, 2 * n + 1] for n in plain]


def test_unequal_lengths_and_nothing_at_all_are_refused() -> None:
    """Outside a call too: the mistake shows before the pool does."""
    for inside in (False, True):
        if inside:
            become(0, 2)
        with pytest.raises(ValueError, match="equally long, not 2, 3"):
            shard([1, 2], [1, 2, 3])
        with pytest.raises(TypeError):
            shard()
        with pytest.raises(TypeError):
            shard(iter([1]))


# ---- the voice


def heard(function: Callable[[], object]) -> tuple[str, str]:
    """What reaches file descriptors 1 and 2 while the function runs. Python's streams write there too, as in a rank."""
    with contextlib.ExitStack() as stack:
        files = []
        for fd, name in ((1, "stdout"), (2, "stderr")):
            file = stack.enter_context(tempfile.TemporaryFile("w+"))
            saved = os.dup(fd)
            stack.callback(os.close, saved)
            stack.callback(os.dup2, saved, fd)
            stack.callback(setattr, sys, name, getattr(sys, name))
            os.dup2(file.fileno(), fd)
            stream = stack.enter_context(open(fd, "w", closefd=False))
            setattr(sys, name, stream)
            files.append(file)
        function()
        sys.stdout.flush()
        sys.stderr.flush()
        texts = []
        for file in files:
            file.seek(0)
            texts.append(file.read())
    return texts[0], texts[1]


def speak() -> int:
    print("python")
    print("error", file=sys.stderr)
    os.write(1, b"descriptor\n")
    subprocess.run(["/bin/sh", "-c", "echo child; echo child error >&2"], check=True)
    return 42


ALL = ("python\ndescriptor\nchild\n", "error\nchild error\n")


def flat(text: tuple[str, str]) -> tuple[list[str], list[str]]:
    """Lines, whatever their order: Python's buffer and the child's writes interleave as they like."""
    return sorted(text[0].split()), sorted(text[1].split())


DECORATED = {
    "stdout, the head only": (sky.stdout(only="head"), {0: (True, True), 1: (False, True)}),
    "stderr, the head only": (sky.stderr(only="head"), {0: (True, True), 1: (True, False)}),
    "stdout, by predicate": (sky.stdout(only=lambda info: info.rank == 1), {0: (False, True), 1: (True, True)}),
    "silent": (sky.silent, {0: (False, False), 1: (False, False)}),
    "nested": (
        lambda function: sky.stdout(only="head")(sky.stderr(only="head")(function)),
        {0: (True, True), 1: (False, False)},
    ),
}


@pytest.mark.parametrize(("decorate", "shown"), DECORATED.values(), ids=DECORATED)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_voice_is_limited_inside_a_call(decorate: Any, shown: Any, rank: int) -> None:
    """Python, the file descriptor itself and child processes alike; the result comes all the same."""
    become(rank, 2)
    results = []
    text = heard(lambda: results.append(decorate(speak)()))
    assert results == [42]
    assert flat(text) == flat((ALL[0] if shown[rank][0] else "", ALL[1] if shown[rank][1] else ""))


def test_outside_a_call_everything_is_shown() -> None:
    assert flat(heard(sky.silent(speak))) == flat(ALL)


def test_the_voice_comes_back_afterwards_also_after_an_exception() -> None:
    @sky.silent
    def fails() -> None:
        print("unheard")
        raise KeyError("x")

    def test() -> None:
        descriptors = len(list(Path("/proc/self/fd").iterdir()))
        with pytest.raises(KeyError):
            fails()
        print("heard")
        assert len(list(Path("/proc/self/fd").iterdir())) == descriptors

    become(0, 1)
    assert heard(test) == ("heard\n", "")


@pytest.mark.parametrize("above", [False, True], ids=["below", "above"])
def test_decorators_go_above_and_below_sky_function(above: bool) -> None:
    """In either order it is a function for hosts, and its limit holds inside."""
    function = sky.silent(sky.function(timeout=5)(speak)) if above else sky.function(timeout=5)(sky.silent(speak))
    assert isinstance(function, sky.Function)
    assert function.timeout == 5
    assert isinstance(function(), sky.Call)
    become(0, 1)
    assert heard(function.fn) == ("", "")


def in_a_rank(source: str, *, rank: int = 1) -> str:
    """Packs ``f`` of a script, and calls it in a new process, which is this rank of two. Returns what it prints."""
    from skyfab.calls.pack import pack_function
    from skyfab.protocol import codec

    space: dict[str, Any] = {"__name__": "a_script", "sky": sky}
    exec(source, space)
    payload = pack_function(space["f"]).payload
    code = (
        "import sys\n"
        "from skyfab import context\n"
        "from skyfab.protocol import codec\n"
        f"context.enter(context.InstanceInfo(rank={rank}, world_size=2))\n"
        "load = codec.loader(sys.stdin.buffer.read())\n"
        "plugins, (fn, by_name, *_) = load(), load()\n"
        "(fn.fn if by_name else fn)()\n"
    )
    assert isinstance(payload, codec.Payload)
    assert not payload.buffers
    done = subprocess.run([sys.executable, "-c", code], input=payload.data, capture_output=True, check=True)
    return done.stdout.decode()


@pytest.mark.parametrize(
    ("order", "rank", "said"),
    [
        ("@sky.function\n@sky.stdout(only='head')", 0, "spoken\n"),
        ("@sky.function\n@sky.stdout(only='head')", 1, ""),
    ],
)
def test_a_limit_travels_with_a_function_that_is_sent_by_value(order: str, rank: int, said: str) -> None:
    """Functions of scripts and notebooks are pickled whole: the limit must ask the rank it arrives in."""
    assert in_a_rank(f"{order}\ndef f(): print('spoken')\n", rank=rank) == said


def test_the_place_and_the_share_are_known_in_a_function_sent_by_value() -> None:
    names = "from skyfab import instance_info, shard\n"
    body = "print(instance_info().rank, shard([1, 2, 3]))"
    assert in_a_rank(f"{names}@sky.function\ndef f(): {body}\n") == "1 [2]\n"
