"""Programs as others write them, and those of Skyward's guides, on hosts that have only the system's Python.

The programs are in folders beside this file. Their packages are installed as for any user. One file, so that one lab
gets torch.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stage.projects import skyfab

from skyfab.lab import Lab

PROGRAMS = Path(__file__).parent
pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(600)]  # the first with torch installs it

Run = Callable[..., list[str]]


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@pytest.fixture
def run(namespaces: Lab) -> Run:
    """``run(folder, "--hosts=node1", "train.py")``: the lines of the ranks' output."""

    def command(folder: Path, *words: str) -> list[str]:
        ran = skyfab(folder, "run", *words, inventory=namespaces.inventory, timeout=580)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout.splitlines()

    return command


@pytest.fixture
def guide(namespaces: Lab, tmp_path: Path) -> Run:
    """``guide("g01_first_call")``: the lines that the program of a guide prints."""

    def program(name: str, **environ: str) -> list[str]:
        script = shutil.copy(PROGRAMS / "guides" / f"{name}.py", tmp_path)
        env = {**os.environ, "SKYFAB_INVENTORY": str(namespaces.inventory), **environ}
        ran = subprocess.run(
            [sys.executable, script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=580
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout.splitlines()

    return program


@pytest.fixture
def cpu_torch() -> None:
    """The environments of hosts get the same build as this one: a build for CUDA would be gigabytes for each host."""
    torch = pytest.importorskip("torch")
    if torch.version.cuda or torch.version.hip:
        pytest.skip("torch is not a build for CPUs")


def copy(name: str, to: Path) -> Path:
    return Path(shutil.copytree(PROGRAMS / name, to / name))


def losses(lines: list[str]) -> list[float]:
    return [float(text) for line in lines for text in re.findall(r"(?:loss|->) (\d+\.\d+)", line)]


# ---- programs as others write them


@pytest.mark.torch
@pytest.mark.usefixtures("cpu_torch")
def test_a_language_model_is_trained_resumed_twice_and_sampled(run: Run, tmp_path: Path) -> None:
    """In the manner of nanoGPT: settings are executed, .gitignore has the data and the checkpoints, rank 0 writes."""
    import torch

    folder = copy("char_lm", tmp_path)
    hosts, files = "--hosts=node1,node2", ("--sync=all", "--get=out-tiny/*")
    run(folder, "--hosts=node1", "--sync", "--get=data/verse/*.*", "data/verse/prepare.py")
    assert (folder / "data" / "verse" / "train.bin").stat().st_size > 10_000
    first = losses(run(folder, hosts, *files, "train.py", "config/tiny.py"))
    assert len(first) == 4 and first[-1] < first[0] / 4
    for done in (30, 60):
        checkpoint = torch.load(folder / "out-tiny" / "ckpt.pt")
        assert checkpoint["iter_num"] == done and checkpoint["config"]["width"] == 32
        lines = run(
            folder, hosts, *files, "train.py", "config/tiny.py", "--init_from=resume", f"--max_iters={done + 30}"
        )
        assert sorted(line for line in lines if "resuming" in line) == [
            f"node{number}[{number - 1}] resuming at iteration {done}" for number in (1, 2)
        ]
        assert losses(lines)[0] < first[-2]
    assert torch.load(folder / "out-tiny" / "ckpt.pt")["iter_num"] == 90
    (line,) = run(folder, "--hosts=node1", "sample.py", "--out_dir=out-tiny", "--max_new_tokens=12")
    assert line == "node1[0] one fish two fi"


def test_hydra_finds_its_configuration_and_what_it_writes_is_fetched(run: Run, tmp_path: Path) -> None:
    folder = copy("regression", tmp_path)
    words = ("--hosts=node1", "--sync", "--get=outputs/**", "--get=multirun/**")
    (line,) = run(folder, *words[:3], "main.py", "model=parabola")
    assert "parabola: loss" in line
    (result,) = folder.glob("outputs/*/*/result.json")
    found = json.loads(result.read_text())
    assert found["losses"][-1] < found["losses"][0] / 100 and len(found["weights"]) == 3
    assert "model=parabola" in (result.parent / ".hydra" / "overrides.yaml").read_text()
    run(folder, *words, "main.py", "-m", "lr=0.1,0.01", "steps=5")
    several = [json.loads(path.read_text())["lr"] for path in sorted(folder.glob("multirun/*/*/*/result.json"))]
    assert several == [0.1, 0.01]


@pytest.mark.torch
@pytest.mark.usefixtures("cpu_torch")
def test_shards_of_a_checkpoint_come_from_both_hosts_and_resume(run: Run, tmp_path: Path) -> None:
    """FSDP2: every rank writes its own part, on its own host."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    folder = copy("sharded", tmp_path)
    words = ("--hosts=node1,node2", "--sync", "train.py", "--steps", "15")
    first = losses(run(folder, "--get=checkpoints/15/**", *words))
    assert first[-1] < first[0] / 2
    parts = sorted(path.name for path in (folder / "checkpoints" / "15").iterdir())
    assert parts == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    lines = run(folder, "--get=checkpoints/30/**", *words)
    assert sorted(line for line in lines if "continues" in line) == [
        f"node{rank + 1}[{rank}] rank {rank}: continues after step 15" for rank in range(2)
    ]
    second = losses(lines)
    assert second[0] < 1.2 * first[-1] and second[-1] < first[-1]
    dcp_to_torch_save(folder / "checkpoints" / "30", tmp_path / "whole.pt")
    import torch

    whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert whole["model"]["3.weight"].shape == (4, 16)
    assert whole["optimizer"]["state"]["3.weight"]["step"] == 30


def test_a_package_in_src_is_run_by_the_path_of_its_main_module(run: Run, tmp_path: Path) -> None:
    """Its dependencies are those of pyproject.toml; it imports itself by name, and reads a file of its own."""
    folder = copy("package", tmp_path)
    expected = ["node1[0] 0 red=2 blue=1", "node2[1] 1 red=2 blue=1"]
    for place, script in ((folder, "src/counts/__main__.py"), (folder / "src", "counts/__main__.py")):
        assert sorted(run(place, "--hosts=node1,node2", script, "red", "blue", "red", "green")) == expected


@pytest.mark.torch
@pytest.mark.usefixtures("cpu_torch")
def test_keras_is_the_first_import_of_a_script(run: Run, tmp_path: Path) -> None:
    folder = copy("keras_top", tmp_path)
    (line,) = run(folder, "--hosts=node1", "--with-plugin=keras", "--get=model.keras", "train.py")
    first, last = losses([line])
    assert line.startswith("node1[0] torch: ") and last < first / 2
    with zipfile.ZipFile(folder / "model.keras") as file:
        assert file.testzip() is None and "model.weights.h5" in file.namelist()


@pytest.fixture
def in_home(home: Path) -> Iterator[Path]:
    """The home folder, with two programs and their helper module directly in it, beside other files."""
    names = [path.name for path in (PROGRAMS / "home").glob("*.py")]
    for name in names:
        shutil.copy(PROGRAMS / "home" / name, home)
    (home / "private.txt").write_text("private")
    yield home
    for name in (*names, "private.txt"):
        (home / name).unlink()


def test_a_script_in_the_home_folder_has_the_module_beside_it(run: Run, in_home: Path, namespaces: Lab) -> None:
    lines = run(in_home, "--hosts=node1,node2", "--workdir=/var/tmp/estimates", "estimate.py", "2000")
    assert [re.sub(r"3\.[012]\d", "pi", line) for line in sorted(lines)] == [
        "node1[0] 0 of 2: pi",
        "node2[1] 1 of 2: pi",
    ]
    for number, host in enumerate(namespaces.hosts[:2]):
        assert host.run(["ls", "/var/tmp/estimates"]).stdout.split() == [f"hits{number}.txt"]
        found = host.run(["find", "/root", "/var/tmp", "-name", "private.txt"]).stdout
        assert found == "", "only the modules that a script imports are sent"
        host.run(["rm", "-r", "/var/tmp/estimates"])


def test_a_program_in_the_home_folder_has_the_module_beside_it(in_home: Path, namespaces: Lab) -> None:
    env = {**os.environ, "SKYFAB_INVENTORY": str(namespaces.inventory)}
    ran = subprocess.run([sys.executable, "estimate_pool.py"], cwd=in_home, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert 3 < float(ran.stdout) < 3.3


# ---- Skyward's guides: https://github.com/gabfssilva/skyward/tree/main/guides
#
# The same uses of its names, with hosts in place of a provider. 15, a model that is sent, trained and returned, is
# examples/models/round_trip.py, which tests/env/test_environments.py runs on such a host.


def test_guide_01_a_first_call(guide: Run) -> None:
    assert guide("g01_first_call") == ["power: 1024", "values: {'least': 1.0, 'most': 6.0, 'mean': 3.0}"]


def test_guide_02_parallel_calls(guide: Run) -> None:
    streamed = [f"streamed: {100 * number}" for number in range(5)]
    assert guide("g02_parallel") == ["gathered: (1, 3, 5, 7)", "two: 3 a-b", "three: 7 c 0", *streamed]


def test_guide_03_a_broadcast_over_shards(guide: Run) -> None:
    assert guide("g03_broadcast") == [*(f"node {node}: 25 values" for node in range(4)), "all: 4950 of 4950"]


@pytest.mark.torch
@pytest.mark.usefixtures("cpu_torch")
def test_guide_04_what_a_host_has(guide: Run) -> None:
    assert guide("g04_devices") == ["node1: node 0 of 1, GPUs: 0", "(64, 64)"]


def test_guide_05_shards_keep_pairs_and_types(guide: Run) -> None:
    kinds = ["list", "tuple", "ndarray"]
    assert guide("g05_shards") == ["sizes: [51, 50]", "complete: True", f"types: {[kinds, kinds]}"]


@pytest.mark.torch
@pytest.mark.usefixtures("cpu_torch")
def test_guide_06_one_model_on_two_hosts(guide: Run) -> None:
    *epochs, head, worker = guide("g06_ddp")
    found = losses(epochs)
    assert all(line.startswith("node1[0] epoch ") for line in epochs) and len(found) == 4
    assert found[-1] < found[0] / 1.5
    assert (head, worker) == (f"node 0 head: loss {found[-1]:.4f}", f"node 1 worker: loss {found[-1]:.4f}")


@needs("keras", "jax")
def test_guide_07_keras_at_the_top(guide: Run) -> None:
    """Keras is imported on this machine too, where KERAS_BACKEND is the user's own choice."""
    lines = guide("g07_keras", KERAS_BACKEND="jax")
    for node, line in enumerate(lines):
        first, last = losses([line])
        assert line.startswith(f"node {node} jax: 200, ") and last < first / 1.5
    assert len(lines) == 2


@pytest.mark.torch
@pytest.mark.usefixtures("cpu_torch")
def test_guides_08_and_20_a_model_is_fine_tuned_and_used(guide: Run) -> None:
    """The second program finds what the first has left in the working folder."""
    *_, line = guide("g08_finetune")
    assert re.fullmatch(r"node 0: loss 0\.\d+, accuracy 1\.00", line)
    assert guide("g20_inference")[-2:] == ["good film: positive", "poor plot: negative"]


@needs("joblib", "sklearn")
def test_guides_09_and_10_joblib_and_a_grid_search(guide: Run) -> None:
    """In the pool's environment, which has the versions of this machine."""
    assert guide("g10_joblib") == ["results: 80 6320", "in parallel: True"]
    assert guide("g09_grid_search")[-2:] == ["candidates: 8", "best: SVC True"]


def test_guide_11_variables_and_several_hosts(guide: Run) -> None:
    """On hosts of the lab; tests/providers has the same with containers."""
    places = [(0, 3, True), (1, 3, False), (2, 3, False)]
    assert guide("g11_containers") == ["node1", "good morning", str(places), "1225"]


def test_guide_21_calls_that_need_no_other_node(guide: Run) -> None:
    chunks = f"chunks: {list(range(8))}"
    assert guide("g21_independent") == [chunks, "different: 8", "nodes: 4"]
