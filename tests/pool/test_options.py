"""Options that no pool can have are refused before anything is connected to."""

from __future__ import annotations

from typing import Any

import pytest

import skyfab as sky


@pytest.mark.parametrize(
    "options",
    [
        *({"ranks": value} for value in (0, -1, "2", "many", 1.5, True, None)),
        *({"lease": value} for value in (0.5, "60", None, float("nan"), True)),
        *({"heartbeat_timeout": value} for value in (0, -1, "10")),
        *({"timeout": value} for value in (0, "10", True, float("nan"))),
        *({"slots": value} for value in (0, -1, "2", True, 1_000_000)),
        *({"results": value} for value in ("all", None, 1)),
        {"ui": "nome"},
        {"image": "torch"},
    ],
    ids=str,
)
def test_what_cannot_be_is_said_with_its_value(options: dict[str, Any]) -> None:
    with pytest.raises(sky.UsageError) as failed:
        sky.Compute("local", **options)
    ((name, value),) = options.items()
    assert f"{name}={value!r}" in failed.value.message


@pytest.mark.parametrize("plugin", ["torch", sky.plugins.torch], ids=["name", "function"])
def test_what_is_not_a_plugin_is_refused(plugin: Any) -> None:
    with pytest.raises(sky.UsageError, match="not a plugin") as failed:
        sky.Compute("local", plugins=[plugin])
    assert "sky.plugins.torch()" in str(failed.value.hint)
