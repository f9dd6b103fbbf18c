"""Plugin for Hugging Face Accelerate: sets its configuration as the environment variables of ``accelerate launch``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from skyfab.errors import UsageError
from skyfab.plugins.base import Plugin
from skyfab.plugins.packages import with_packages

if TYPE_CHECKING:
    from skyfab.calls.image import Image
    from skyfab.context import InstanceInfo
    from skyfab.inventory.host import Host

_LAUNCHERS: Final = frozenset(
    {
        *("compute_environment", "distributed_type", "main_training_function", "gpu_ids"),
        *("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port"),
        *("rdzv_backend", "same_network", "tpu_env", "tpu_use_cluster", "tpu_use_sudo"),
    }
)
"""Keys of a configuration file about machines and processes. Ignored: the pool determines these."""

_SECTIONS: Final = {
    # Section: the optional prefix of its keys, the prefix of its variables, and the variable that enables it.
    "dynamo_config": ("dynamo_", "ACCELERATE_DYNAMO_", None),
    "fp8_config": ("fp8_", "ACCELERATE_FP8_", None),
    "fsdp_config": ("fsdp_", "FSDP_", "ACCELERATE_USE_FSDP"),
    "deepspeed_config": ("deepspeed_", "ACCELERATE_DEEPSPEED_", "ACCELERATE_USE_DEEPSPEED"),
    "megatron_lm_config": ("megatron_lm_", "MEGATRON_LM_", "ACCELERATE_USE_MEGATRON_LM"),
    "parallelism_config": ("parallelism_config_", "PARALLELISM_CONFIG_", "ACCELERATE_USE_PARALLELISM_CONFIG"),
}

_IRREGULAR: Final = {
    "debug": "ACCELERATE_DEBUG_MODE",
    "enable_cpu_affinity": "ACCELERATE_CPU_AFFINITY",
    "fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
}


@dataclass(frozen=True)
class Accelerate(Plugin):
    """Hugging Face Accelerate on every host, configured as by ``accelerate config``.

    `config` has the keys of accelerate's configuration file: ``{"mixed_precision": "bf16", "fsdp_config": {…}}``.
    Those about machines and processes are ignored: the pool sets them. Raises UsageError for an unknown section.
    """

    network = "needed"
    config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        variables(self.config)  # raises for a mistake here, not on the hosts

    def transform(self, image: Image, host: Host) -> Image:
        return with_packages(image, host, "accelerate")

    @contextmanager
    def around_process(self, info: InstanceInfo) -> Iterator[None]:
        os.environ.update(variables(self.config))
        yield

    @contextmanager
    def around_call(self, info: InstanceInfo) -> Iterator[None]:
        meet_on_cpus(info)
        yield


def meet_on_cpus(info: InstanceInfo) -> None:
    """Makes ranks without GPUs of their own form one group on CPUs.

    Otherwise accelerate, and the Trainer, run on each rank as if it were alone.
    """
    torch = sys.modules.get("torch")  # loaded by its plugin, whatever the order of plugins
    if torch is None or info.world_size < 2:
        return
    devices = getattr(torch, "accelerator", torch.cuda)
    if not devices.is_available() or devices.device_count() < info.local_world_size:
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")


def variables(config: Mapping[str, Any]) -> dict[str, str]:
    """The environment variables for a configuration. Raises UsageError for an invalid one.

    >>> variables({"mixed_precision": "bf16", "dynamo_config": {"dynamo_backend": "INDUCTOR"}})
    {'ACCELERATE_MIXED_PRECISION': 'bf16', 'ACCELERATE_DYNAMO_BACKEND': 'INDUCTOR'}
    """
    found: dict[str, str] = {}
    for key, value in config.items():
        if key in _LAUNCHERS or value is None:
            continue
        if not isinstance(value, Mapping):
            found |= _setting(key, value, *_home(key))
        elif key in _SECTIONS:
            start, prefix, switch = _SECTIONS[key]
            found |= {switch: "true"} if switch and value else {}
            for inner, setting in value.items():
                found |= _setting(inner, setting, start, prefix)
        else:
            hint = f"one of {', '.join(_SECTIONS)}"
            raise UsageError(f"unknown section {key!r} in accelerate(config=…)", hint=hint)
    return found


def _home(key: str) -> tuple[str, str]:
    """The prefixes for a key outside of any section: dynamo_backend belongs to dynamo's section."""
    sections = ((start, prefix) for start, prefix, _ in _SECTIONS.values())
    return next((home for home in sections if key.startswith(home[0])), ("", "ACCELERATE_"))


def _setting(key: str, value: Any, start: str, prefix: str) -> dict[str, str]:
    if value is None:
        return {}
    return {_IRREGULAR.get(key) or prefix + key.removeprefix(start).upper(): _text(key, value)}


def _text(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (str, int, float)):
        return str(value)
    raise UsageError(
        f"accelerate(config=…): {key} must be a string, a number or a boolean, not a {type(value).__name__}"
    )
