"""Options that no pool can have are refused before anything is connected to."""

from __future__ import annotations

from typing import Any

import pytest

import skyfab as sky


def test_what_cannot_be_is_said_with_its_value() -> None:
    wrong: list[dict[str, Any]] = [
        *({"ranks": value} for value in (0, "many", 1.5, True)),
        *({"lease": value} for value in (0.5, float("nan"))),
        *({"heartbeat_timeout": 0}, {"timeout": "10"}, {"slots": 1_000_000}, {"slots": "2"}, {"results": "all"}),
        *({"ui": "nome"}, {"image": "torch"}),
    ]
    for options in wrong:
        with pytest.raises(sky.UsageError) as failed:
            sky.Compute("local", **options)
        ((name, value),) = options.items()
        assert f"{name}={value!r}" in failed.value.message
    for plugin in ("torch", sky.plugins.torch):
        with pytest.raises(sky.UsageError, match="not a plugin") as failed:
            sky.Compute("local", plugins=[plugin])  # type: ignore[list-item]
        assert "sky.plugins.torch()" in str(failed.value.hint)
