"""Registers remote devices with PyTorch: the device type, its kernels, and changes to what PyTorch itself does.

PyTorch has one accelerator in a process. Registering makes remote devices the one, for good, so nothing here happens
before a device is asked for.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils import backend_registration

from skyfab._util.signals import SIGNAL_GUARD, without_signals
from skyfab.device import (
    after_error,
    autocast,
    batches,
    composite_ops,
    manual_kernels,
    patches,
    sparse,
    torch_compile,
    torch_sky,
)
from skyfab.device.kernels import make_kernel
from skyfab.device.tensors import TYPE
from skyfab.errors import UsageError
from skyfab.host.device import composite_host

_OWN_WAY: Final = frozenset(
    (
        "lift",
        "lift_fresh",
        "lift_fresh_copy",
        "_fused_sdp_choice",
        "is_pinned",
        "_pin_memory",
        "_cudnn_init_dropout_state",
        "_lazy_clone",
        "_pack_padded_sequence",
        "_unsafe_view",
        "record_stream",
    )
)
"""Operators that PyTorch composes of others, or that mean nothing on a remote device."""
_setup: Final[Any] = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
_libraries: Final[list[torch.library.Library]] = []
"""Kernels are registered as long as these objects exist."""


_PRIVATE: Final = torch._C._autograd.DeviceType.PrivateUse1
_probe: Final = functools.partial(bool)
"""Calling it is a SystemError where Python's error is set, with that error as its cause."""


class _Guard(torch._C._acc.DeviceGuard):  # type: ignore[misc]
    """PyTorch asks it several times for each operation, and the process ends if anything is raised meanwhile.

    It looks up `type_`, converts a string, which handles signals, and calls what it has found: signals wait until then.
    It is also asked while what a hook has raised ends a backward. Python's error is still set then. Returning with it
    would end the process, so it is taken away, and raised again when the backward has ended.
    """

    @property
    @without_signals
    def type_(self) -> Any:
        try:
            _probe()
        except SystemError as error:
            patches.raised.error = error.__cause__
        SIGNAL_GUARD.held.append(_PRIVATE)
        return _answer


_answer: Final = functools.partial(SIGNAL_GUARD.held.pop)
"""Not a function in Python: a signal handler cannot interrupt it."""


def is_registered() -> bool:
    return bool(_libraries)


def check() -> None:
    """Raises UsageError if this PyTorch cannot have the device type."""
    if is_registered():
        return
    if _setup is None:
        raise UsageError(
            f"torch {torch.__version__} does not support device types written in Python",
            hint="install torch 2.11 or newer",
        )
    name = torch._C._get_privateuse1_backend_name()
    if name != "privateuseone":
        raise UsageError(f"the device type {name!r} is already registered in this process; PyTorch allows only one")


def register() -> None:
    """Registers the device type, once, after `check`."""
    if is_registered():
        return
    if torch.accelerator.is_available():
        own = torch.accelerator.current_accelerator()
        print(
            f"skyfab: PyTorch supports one accelerator per process: now the remote one. Tensors on {own} still "
            "work, but backward() over them does not: to train on them, use another process.",
            file=sys.stderr,
        )
    SIGNAL_GUARD.watch()  # for good: PyTorch asks the guard in every backward, also without remote tensors
    _setup(TYPE, backend_module=torch_sky, device_guard=_Guard())
    torch.autograd.set_multithreading_enabled(False)
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    own_kernels = {**manual_kernels.kernels(), **composite_ops.undifferentiated(), **composite_ops.differentiable()}
    for operator, kernel in own_kernels.items():
        library.impl(operator, kernel, "PrivateUse1")
    for operator, op in _operators(own_kernels):
        library.impl(operator, make_kernel(op), "PrivateUse1")
    for operator, kernel in composite_ops.differentiable().items():
        library.impl(operator, kernel, "AutogradPrivateUse1")
    sparse.register(library)
    _libraries.extend(autocast.register())
    patches.apply()
    torch_compile.apply()
    batches.on_error.append(after_error.forget)


def _operators(own: dict[str, Callable[..., Any]]) -> list[tuple[str, Any]]:
    """The operators that get a generated kernel."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    found = []
    for full in torch._C._dispatch_get_all_op_names():
        name = full.removeprefix("aten::")
        base, _, overload = name.partition(".")
        if name == full or name in own or base in _OWN_WAY:
            continue
        op = composite_host.operator(name)
        is_composed = has(full, "CompositeImplicitAutograd") and not has(full, "CPU")
        if is_composed or torch.Tag.inplace_view in op.tags:
            continue
        if any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns):
            continue  # a view
        if overload.endswith("out") and has(full, "CompositeExplicitAutograd"):
            continue
        found.append((name, op))
    return found
