"""Makes ``torch.compile`` use the backend of remote devices (graph_backend.py) for their tensors.

Importing this does not import Dynamo, which takes seconds: that is prepared when a program compiles something.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from skyfab.device.tensors import TYPE, is_remote


def apply() -> None:
    """Changes PyTorch's own functions, once."""
    inductor, others = torch._TorchCompileInductorWrapper, torch._TorchCompileWrapper
    inductor.__init__ = _preparing(inductor.__init__)
    others.__init__ = _preparing(others.__init__)
    inductor.__call__ = _chosen(inductor.__call__)
    torch.compile = _with_own_option(torch.compile)
    if "torch._dynamo" in sys.modules:  # something was compiled before the device was opened
        _prepare()


def _preparing(original: Any) -> Any:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        _prepare()
        original(self, *args, **kwargs)

    return init


@functools.cache
def _prepare() -> None:
    """Registers the backend with Dynamo."""
    from torch._dynamo import register_backend, trace_rules
    from torch._dynamo.variables.optimizer import OptimizerVariable

    from skyfab.device import graph_backend

    register_backend(graph_backend.backend, name=TYPE)
    trace_rules.add("skyfab")  # after a graph break, Dynamo would trace the kernels of operators
    OptimizerVariable._set_capturable = _capturable(OptimizerVariable._set_capturable)


def _with_own_option(original: Any) -> Any:
    """Inductor refuses the option "there": with it, the backend is that of remote devices.

    It may be given with a mode, which stands for options of Inductor: PyTorch takes a mode or options.
    """

    @functools.wraps(original)
    def compiled(*args: Any, mode: Any = None, options: Any = None, **kwargs: Any) -> Any:
        if options and "there" in options and kwargs.get("backend") in (None, "inductor"):
            kwargs["backend"] = TYPE
        if mode is not None and options and set(options) == {"there"}:
            from torch._inductor import list_mode_options

            mode, options = None, {**list_mode_options(mode), **options}
        return original(*args, mode=mode, options=options, **kwargs)

    return compiled


def _chosen(original: Any) -> Any:
    """Inductor, or for graphs with tensors of a remote device its own backend."""

    @functools.wraps(original)
    def call(self: Any, module: Any, inputs: Any, **kwargs: Any) -> Any:
        from skyfab.device import graph_backend

        if not graph_backend.is_remote_graph(module):
            return original(self, module, inputs, **kwargs)
        return graph_backend.backend(module, inputs, options={**self.config, **(kwargs.get("config_patches") or {})})

    return call


def _capturable(original: Any) -> Any:
    """The counts of steps of a compiled optimizer are on the device, as Dynamo does for GPUs.

    Else the graph would change tensors in this machine's memory.
    """

    @functools.wraps(original)
    def set_capturable(self: Any, tx: Any) -> None:
        optimizer = self.value
        for group in optimizer.param_groups:
            if "capturable" in group and group["params"] and all(map(is_remote, group["params"])):
                group["capturable"] = True
                for parameter in group["params"]:
                    state = optimizer.state.get(parameter, {})
                    step = state.get("step")
                    if isinstance(step, torch.Tensor) and not is_remote(step):
                        state["step"] = step.to(parameter.device)
        original(self, tx)

    return set_capturable
