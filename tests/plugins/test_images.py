"""What plugins make of an image: packages and indexes, added once, unless the user has chosen. No host is reached."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest

import skyfab as sky
from skyfab.plugins.accelerate import variables

HOST = sky.Host(name="node1")
PLUGINS = {
    "torch": sky.plugins.torch(),
    "jax": sky.plugins.jax(),
    "keras": sky.plugins.keras(),
    "huggingface": sky.plugins.huggingface(token="hf_do-not-show"),
    "accelerate": sky.plugins.accelerate({"mixed_precision": "bf16"}),
    "dask": sky.plugins.dask(),
    "ray": sky.plugins.ray(),
}


@pytest.fixture(params=PLUGINS)
def plugin(request: pytest.FixtureRequest) -> sky.plugins.Plugin:
    """Each plugin that comes with skyfab."""
    return PLUGINS[request.param]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The versions that this machine claims to have."""
    versions: dict[str, str] = {"torch": "2.13.0+cpu"}

    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr("importlib.metadata.version", version)
    return versions


def pip(plugin: sky.plugins.Plugin, *named: str, host: sky.Host = HOST, **image: Any) -> tuple[str, ...]:
    return plugin.transform(sky.Image(pip=named, **image), host).pip


# ---- all of them


@pytest.mark.parametrize(
    ("image", "host"),
    [
        (sky.Image(python="/usr/bin/python3"), HOST),
        (sky.Image(lock="pylock.toml"), HOST),
        (sky.Image(), sky.Host(name="node1", python="/opt/conda/bin/python")),
        (sky.Image(python="3.11"), sky.Host(name="here", transport="local")),
    ],
    ids=["a path", "a lock", "the host's own", "local"],
)
def test_an_interpreter_that_was_chosen_is_used_as_it_is(
    plugin: sky.plugins.Plugin, image: sky.Image, host: sky.Host
) -> None:
    assert plugin.transform(image, host) is image


def test_packages_are_added_where_the_image_asks_for_some(plugin: sky.plugins.Plugin) -> None:
    """An environment is built then, whatever the host's own interpreter has."""
    host = sky.Host(name="node1", python="/opt/conda/bin/python")
    assert pip(plugin, "attrs", host=host)[0] == "attrs"
    assert len(pip(plugin, "attrs", host=host)) > 1


def test_nothing_is_added_twice(plugin: sky.plugins.Plugin) -> None:
    once = plugin.transform(sky.Image(), HOST)
    assert plugin.transform(once, HOST) == once


def test_plugins_go_together_in_any_order(installed: dict[str, str]) -> None:
    """Keras asks for the torch that torch's own plugin would, so that the first to ask asks for the right one."""
    one = two = sky.Image()
    for each in PLUGINS.values():
        one = each.transform(one, HOST)
    for each in reversed(PLUGINS.values()):
        two = each.transform(two, HOST)
    assert sorted(one.pip) == sorted(two.pip)
    assert "torch==2.13.0" in one.pip


def test_plugins_load_with_the_standard_library_alone() -> None:
    code = (
        "import sys, skyfab.plugins\n"
        "print(*{m.partition('.')[0] for m in sys.modules} - {*sys.stdlib_module_names, 'skyfab', '__main__'})\n"
    )
    path = str(sky.__file__).rpartition("/skyfab/")[0]
    program = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {path!r})\n{code}"]
    assert subprocess.run(program, capture_output=True, text=True, check=True).stdout.split() == []


@pytest.mark.parametrize(
    ("plugins", "words"),
    [
        ([sky.plugins.jax(), sky.plugins.torch()], "plugins.jax and plugins.torch"),
        ([sky.plugins.torch(), sky.plugins.torch(cuda="cpu")], "plugins.torch and plugins.torch"),
        ([sky.plugins.keras("jax"), sky.plugins.keras("torch")], "plugins.keras and plugins.keras"),
    ],
)
def test_plugins_that_cannot_be_in_one_pool_are_refused_before_any_host_is_reached(
    plugins: list[sky.plugins.Plugin], words: str
) -> None:
    with pytest.raises(sky.UsageError, match=f"{words} do not work in one pool") as raised:
        sky.Compute("local", plugins=plugins)
    assert "a pool for each" in str(raised.value.hint)


# ---- torch


def test_torch_is_the_one_that_is_installed_here_or_any(installed: dict[str, str]) -> None:
    assert pip(sky.plugins.torch()) == ("torch==2.13.0", "numpy")
    installed.clear()
    assert pip(sky.plugins.torch(vision=True, audio=True)) == ("torch", "numpy", "torchvision", "torchaudio")


@pytest.mark.parametrize(
    ("torch", "vision", "audio"),
    [
        ("2.9.1", "torchvision==0.24.*", "torchaudio==2.9.*"),
        ("2.13.0", "torchvision==0.28.*", "torchaudio"),
        ("latest", "torchvision", "torchaudio"),
    ],
)
def test_vision_and_audio_belong_to_torch(torch: str, vision: str, audio: str) -> None:
    wanted = "torch" if torch == "latest" else f"torch=={torch}"
    assert pip(sky.plugins.torch(version=torch, vision=True, audio=True)) == (wanted, "numpy", vision, audio)


@pytest.mark.parametrize("build", ["cpu", "cu128"])
def test_a_build_comes_from_an_index_for_torch_alone(build: str) -> None:
    (index,) = sky.plugins.torch(cuda=build).transform(sky.Image(), HOST).pip_indexes
    assert index.url.endswith(f"/whl/{build}")
    assert index.packages == ("torch", "torchvision", "torchaudio")
    assert sky.plugins.torch().transform(sky.Image(), HOST).pip_indexes == (), "the build depends on the host's driver"


def test_an_index_of_the_users_is_torchs_only_one() -> None:
    own = sky.PipIndex("https://example.org/simple", ("torch",))
    image = sky.Image(pip_indexes=(own,))
    assert sky.plugins.torch(cuda="cpu").transform(image, HOST).pip_indexes == (own,)


# ---- the others


def test_dask_is_the_one_that_is_installed_here_with_what_it_uses_here(installed: dict[str, str]) -> None:
    assert pip(sky.plugins.dask()) == ("distributed", "bokeh")
    installed |= {"distributed": "2026.8.0", "numpy": "2.4.6", "pandas": "3.1.1"}
    assert pip(sky.plugins.dask()) == ("distributed==2026.8.0", "bokeh", "numpy==2.4.6", "pandas==3.1.1")
    assert pip(sky.plugins.dask(version="2026.1.0"), "numpy>=2")[:2] == ("numpy>=2", "distributed==2026.1.0")
    assert pip(sky.plugins.dask(version="latest"))[0] == "distributed"


def test_ray_is_that_of_this_machine_or_a_named_one(installed: dict[str, str]) -> None:
    assert pip(sky.plugins.ray()) == ("ray",)
    installed["ray"] = "2.60.0"
    assert pip(sky.plugins.ray()) == ("ray==2.60.0",)
    assert pip(sky.plugins.ray("default", version=">=2.52")) == ("ray[default]>=2.52",)
    assert pip(sky.plugins.ray(), "ray[tune]") == ("ray[tune]",)


def test_keras_brings_its_backend_and_torch_as_the_torch_plugin_would(installed: dict[str, str]) -> None:
    assert pip(sky.plugins.keras(backend="jax")) == ("keras", "jax")
    assert pip(sky.plugins.keras()) == ("keras", "torch==2.13.0", "numpy")


def test_huggingface_brings_its_libraries_and_hides_its_token() -> None:
    plugin = PLUGINS["huggingface"]
    image = plugin.transform(sky.Image(pip=("transformers>=5",)), HOST)
    assert image.pip == ("transformers>=5", "datasets", "tokenizers")
    assert repr(plugin) == "HuggingFace(token=[secret])"
    assert "do-not-show" not in f"{plugin} {image} {plugin.transform(image, HOST).env}"


@pytest.mark.parametrize("first", ["torch", "huggingface"])
def test_torch_and_huggingface_give_a_trainer_that_works(first: str, installed: dict[str, str]) -> None:
    """The Trainer needs accelerate with torch; without torch, it would bring torch along."""
    second = "huggingface" if first == "torch" else "torch"
    image = PLUGINS[second].transform(PLUGINS[first].transform(sky.Image(), HOST), HOST)
    assert set(image.pip) == {"torch==2.13.0", "numpy", "transformers", "datasets", "tokenizers", "accelerate"}
    assert "accelerate" not in pip(PLUGINS["huggingface"])
    assert pip(PLUGINS["huggingface"], "torch", "accelerate==1.9").count("accelerate") == 0


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"mixed_precision": "bf16", "use_cpu": True}, {"MIXED_PRECISION": "bf16", "USE_CPU": "true"}),
        ({"debug": False, "enable_cpu_affinity": True}, {"DEBUG_MODE": "false", "CPU_AFFINITY": "true"}),
        (
            {"dynamo_config": {"dynamo_mode": "default", "use_dynamic": True}},
            {"DYNAMO_MODE": "default", "DYNAMO_USE_DYNAMIC": "true"},
        ),
        (
            {"deepspeed_config": {"zero_stage": 3, "zero3_init_flag": True, "gradient_clipping": 1.0}},
            {
                "USE_DEEPSPEED": "true",
                "DEEPSPEED_ZERO_STAGE": "3",
                "DEEPSPEED_ZERO3_INIT": "true",
                "GRADIENT_CLIPPING": "1.0",
            },
        ),
        ({"fp8_config": {"fp8_format": "E4M3", "backend": "TE"}}, {"FP8_FORMAT": "E4M3", "FP8_BACKEND": "TE"}),
        ({"num_processes": 8, "main_process_ip": "10.0.0.1", "distributed_type": "NO", "downcast_bf16": None}, {}),
    ],
)
def test_accelerates_configuration_is_what_its_launcher_would_set(config: Any, found: dict[str, str]) -> None:
    assert variables(config) == {f"ACCELERATE_{name}": value for name, value in found.items()}


def test_sections_have_variables_of_their_own() -> None:
    sharded = {"fsdp_version": 2, "fsdp_transformer_layer_cls_to_wrap": "Block", "fsdp_offload_params": False}
    assert variables({"fsdp_config": sharded, "parallelism_config": {"parallelism_config_tp_size": 2}}) == {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block",
        "FSDP_OFFLOAD_PARAMS": "false",
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_TP_SIZE": "2",
    }


@pytest.mark.parametrize("config", [{"fdsp_config": {"fsdp_version": 2}}, {"mixed_precision": ["bf16"]}])
def test_a_mistake_in_accelerates_configuration_is_said_at_once(config: Any) -> None:
    with pytest.raises(sky.UsageError):
        sky.plugins.accelerate(config)
