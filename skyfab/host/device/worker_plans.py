"""Plans in the worker of a device: functions that call an operator with the operands of an instruction."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from skyfab.host.device import composite_host, wire
from skyfab.host.device.host_results import is_lazy
from skyfab.host.device.memory import DTYPE_NUMBERS, DTYPES, Tensors

_MODULES: Final = ("sky::module", "sky::module_first")


class Operand(NamedTuple):
    """What an item of an instruction is."""

    kind: str
    is_written: bool
    """The operator may change it."""


class WorkerPlan:
    """How to execute one kind of instruction."""

    __slots__ = ("call", "checked", "first_output", "layouts", "name", "operands", "single")

    def __init__(self, scope: Mapping[str, Any], name: str, args: Any, kwargs: Any, layouts: Any, first: int) -> None:
        """The scope has the device, its tensors, and a function that finds a generator. Operands begin at `first`."""
        self.name = name
        self.call, self.operands = _compile(scope, name, args, kwargs, first)
        self.first_output = first + len(self.operands)
        """Where the ids of the outputs begin in an instruction."""
        self.layouts = layouts
        self.single = False
        """It returns one tensor and no list of them."""
        self.checked = False
        """The outputs have the predicted layout."""
        if name not in composite_host.FUNCTIONS:  # those return tuples
            returns = composite_host.operator(name)._schema.returns
            self.single = len(layouts) == 1 and len(returns) == 1 and not str(returns[0].type).startswith("List")

    def given(self, instruction: Sequence[Any]) -> Iterator[tuple[Operand, Any]]:
        """The operands of an instruction, with what they are."""
        return zip(self.operands, instruction[self.first_output - len(self.operands) :], strict=False)

    def tensors(self, instruction: Sequence[Any]) -> list[int]:
        """The ids of tensors that the instruction names."""
        return [value for (kind, _), value in self.given(instruction) if kind == wire.TENSOR]

    def written(self, instruction: Sequence[Any]) -> list[int]:
        """The ids of tensors that the instruction may change."""
        return [value for (kind, written), value in self.given(instruction) if kind == wire.TENSOR and written]

    def shown(self, instruction: Sequence[Any], tensors: Tensors) -> list[str]:
        """The operands as an error shows them: the layouts of tensors, and numbers."""
        found = []
        for (kind, _), value in self.given(instruction):
            if kind == wire.TENSOR and value in tensors:
                found.append(_shown(tensors[value].dtype, tensors[value].shape))
            elif kind in (wire.VALUE, wire.SCALAR_TENSOR):
                found.append(f"{value[1] if kind == wire.SCALAR_TENSOR else value!r:.80}")
        return found

    def check(self, instruction: Sequence[Any], tensors: Tensors) -> Any:
        """Executes it and makes the outputs as the client predicts them: their strides may differ between devices.

        A plan whose outputs need no change on its first execution is not checked again, unless it calls a module:
        their layout may depend on values.
        """
        inputs = [tensors[ident] for ident in self.tensors(instruction)]
        shapes = [tensor.shape for tensor in inputs]
        result = self.call(instruction)
        if shapes != [tensor.shape for tensor in inputs]:
            raise RuntimeError("unexpectedly resized an argument")
        outputs = [result] if self.single else list(result) if self.layouts else []
        changed = False
        for at, (tensor, layout) in enumerate(zip(outputs, self.layouts, strict=False)):
            if tensor is None or layout is None:
                continue
            shape, strides, dtype = layout
            if tensor.layout is not torch.strided:
                raise NotImplementedError(f"the result is not dense: {tensor.layout}")
            if tuple(tensor.shape) != tuple(shape) or DTYPE_NUMBERS[tensor.dtype] != dtype:
                expected = _shown(DTYPES[dtype], shape)
                raise RuntimeError(f"the result is {_shown(tensor.dtype, tensor.shape)}, expected {expected}")
            same = all(a == b or n <= 1 for a, b, n in zip(tensor.stride(), strides, shape, strict=True))
            if tensor.numel() and (not same or tensor.storage_offset() or is_lazy(tensor)):
                changed = True
                made = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
                outputs[at] = made.copy_(tensor)
        self.checked = not changed and self.name not in _MODULES
        return outputs[0] if self.single else outputs


def _compile(
    outside: Mapping[str, Any], name: str, args: Any, kwargs: Any, first: int
) -> tuple[Callable[[Any], Any], list[Operand]]:
    """A function of an instruction that calls the operator; and what its operands are.

    The source has nothing of what was sent: constants are names in its scope.
    """
    scope: dict[str, Any] = {
        **outside,
        "scalar": _scalar,
        "operator": composite_host.FUNCTIONS.get(name) or composite_host.operator(name),
    }
    operands: list[Operand] = []

    def operand(kind: str, is_written: bool) -> str:
        operands.append(Operand(kind, is_written))
        return f"i[{first + len(operands) - 1}]"

    def source(argument: Any, is_written: bool) -> str:
        kind = argument[0]
        if kind == wire.TENSOR:
            return f"tensors[{operand(kind, is_written)}]"
        if kind == wire.SCALAR_TENSOR:
            return f"scalar({operand(kind, False)})"
        if kind == wire.VALUE:
            return operand(kind, False)
        if kind == wire.GENERATOR_ID:
            return f"generator({operand(kind, False)})"
        if kind == wire.LIST:
            return f"[{','.join(source(item, is_written) for item in argument[1])}]"
        constant = f"c{len(scope)}"
        scope[constant] = scope["device"] if kind == wire.DEVICE else argument[1]
        return constant

    if name in composite_host.FUNCTIONS:
        words = [source(argument, name in _MODULES) for argument in args]
        if name in _MODULES:
            operands = _of_module(operands, args[1][1])
        return eval(f"lambda i: operator({', '.join(words)})", scope), operands  # noqa: S307
    schema = scope["operator"]._schema.arguments
    changed = {argument.name: argument.alias_info is not None and argument.alias_info.is_write for argument in schema}
    words = [source(argument, changed[schema[at].name]) for at, argument in enumerate(args)]
    for key, argument in kwargs:
        if key not in changed:
            raise RuntimeError(f"{name} has no argument {key!r:.80}")
        word = source(argument, changed[key])
        words.append(f"**{{{key!r}: {word}}}" if keyword.iskeyword(key) else f"{key}={word}")
    return eval(f"lambda i: operator({', '.join(words)})", scope), operands  # noqa: S307


def _of_module(operands: Sequence[Operand], spec: Any) -> list[Operand]:
    """The operands of a module's call: it may change its inputs and its buffers, and not its parameters."""
    digest, own, *_ = spec
    module = composite_host.MODULES[digest]
    written = module.written(len(operands) - own)
    return [Operand(kind, at in written) for at, (kind, _) in enumerate(operands)]


def _scalar(operand: Sequence[Any]) -> torch.Tensor:
    return torch.tensor(operand[1], dtype=DTYPES[operand[0]])


def _shown(dtype: torch.dtype | None, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
