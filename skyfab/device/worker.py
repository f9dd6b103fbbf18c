"""The worker of a device: executes the client's instructions with real tensors on a host.

It is an ordinary worker process whose calls are batches of instructions. After an error it skips everything until the
client has told its program: the state stays as if the program had stopped at that instruction.
"""

from __future__ import annotations

import keyword
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from skyfab import context
from skyfab.agent import cuda
from skyfab.agent.worker import show_lines
from skyfab.device import fused, wire
from skyfab.device.channels import ChannelBroken
from skyfab.device.generators import RunningGenerator
from skyfab.device.memory import DTYPES, Lost, Tensors, bytes_of, is_dense
from skyfab.device.transfers import Transfers
from skyfab.protocol import codec

_NUMBERS: Final = {dtype: number for number, dtype in enumerate(DTYPES)}
_TEXT: Final = 8000
_NAMES: Final = {wire.RUN: "run_on", wire.NEXT: "run_on", wire.EMPTY: "empty", wire.MODULE: "remote"} | dict.fromkeys(
    (wire.SEND, wire.RECEIVE), "copy_"
)
"""What a program called, where it was no operator."""


class _Plan:
    """How to execute one kind of instruction."""

    __slots__ = ("call", "checked", "first_output", "layouts", "name", "single")

    def __init__(self, name: str, call: Callable[[Sequence[Any]], Any], first_output: int, layouts: Any) -> None:
        self.name = name
        self.call = call
        self.first_output = first_output
        """Where the ids of the outputs begin in an instruction."""
        self.layouts = layouts
        self.single = False
        """It returns one tensor and no list of them."""
        self.checked = False
        """The outputs have the predicted layout."""


class Executor:
    """The tensors and plans of one device."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._tensors = Tensors()
        self._plans: dict[int, _Plan] = {}
        self._generators: dict[int, torch.Generator] = {}
        self._iterators: dict[int, RunningGenerator] = {}
        """Generators of functions that a program iterates over."""
        self._transfers = Transfers(self._tensors, self._device)
        self._failed = ""
        """Why instructions are not executed; empty if they are."""
        self._reply: Any = None
        self._buffers: list[memoryview] = []
        self._special: dict[int, Callable[[Sequence[Any], Sequence[memoryview]], None]] = {
            wire.VIEW: self._view,
            wire.FREE: self._free,
            wire.PLAN: self._plan,
            wire.DYNAMIC: self._dynamic,
            wire.EMPTY: self._empty,
            wire.MAKE: self._make,
            wire.UPLOAD: self._upload,
            wire.FETCH: self._fetch,
            wire.SEED: self._seed,
            wire.SYNC: self._sync,
            wire.RUN: self._run,
            wire.GENERATOR: self._make_generator,
            wire.STATE: self._state,
            wire.FORGET: self._forget,
            wire.HELLO: self._hello,
            wire.NEXT: self._next,
            wire.MODULE: self._module,
            wire.LISTEN: self._listen,
            wire.CONNECT: self._connect,
            wire.SEND: self._send,
            wire.RECEIVE: self._receive,
        }
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def execute(self, batch: Sequence[Sequence[Any]], buffers: Sequence[memoryview]) -> codec.Payload:
        """Executes a batch. The reply is empty, or what the last instruction that replies has to say."""
        self._reply, self._buffers = None, []
        plans, tensors = self._plans, self._tensors
        at = 0
        with torch.no_grad():
            for at, instruction in enumerate(batch):
                try:
                    number = instruction[0]
                    if number < 0:
                        self._execute_special(number, instruction, buffers)
                    elif not self._failed:
                        plan = plans[number]
                        result = plan.call(instruction) if plan.checked else self._check(plan, instruction)
                        if plan.single:
                            tensors[instruction[plan.first_output]] = result
                        elif plan.layouts:
                            for ident, tensor in zip(instruction[plan.first_output :], result, strict=False):
                                if ident:
                                    tensors[ident] = tensor
                except Exception as error:
                    if cuda.is_unusable(error):
                        raise  # the process ends, and the client learns that its tensors are gone
                    self._failed = f"{type(error).__name__}: {error}"
                    self._reply, self._buffers = {"error": self._describe(error, instruction, at)}, []
                    error.__traceback__ = None
        data = b"" if self._reply is None else wire.encode(self._reply)
        return codec.Payload(data, self._buffers)

    def _execute_special(self, code: int, instruction: Sequence[Any], buffers: Sequence[memoryview]) -> None:
        if code == wire.RESUME:
            self._failed = ""
        elif not self._failed or (code in wire.REMEMBERED and (code != wire.VIEW or instruction[2] in self._tensors)):
            self._special[code](instruction, buffers)

    def _describe(self, error: Exception, instruction: Sequence[Any], at: int) -> dict[str, Any]:
        plan = self._plans.get(instruction[0])
        name = plan.name if plan is not None else _NAMES.get(instruction[0], "")
        if instruction[0] == wire.DYNAMIC:
            name = instruction[1]
        return {
            **({"channel": instruction[1]} if isinstance(error, ChannelBroken) else {}),
            "at": at,
            "kind": type(error).__name__,
            "text": str(error)[:_TEXT],
            "op": name,
            "inputs": [_shape(tensor) for tensor in self._operands(plan, instruction)],
            **self._tensors.usage(self._device),
        }

    def _operands(self, plan: _Plan | None, instruction: Sequence[Any]) -> list[torch.Tensor]:
        """The tensors that an instruction names. A number may be taken for one too."""
        operands = instruction[1 : plan.first_output] if plan is not None else ()
        return [self._tensors[ident] for ident in operands if type(ident) is int and ident in self._tensors]

    # ---- plans

    def _plan(self, instruction: Sequence[Any], buffers: Sequence[memoryview]) -> None:
        _, number, name, args, kwargs, layouts = instruction
        call, first_output = self._compile(name, args, kwargs, first=1)
        plan = self._plans[number] = _Plan(name, call, first_output, layouts)
        if name not in fused.FUNCTIONS:  # those return tuples
            returns = _operator(name)._schema.returns
            plan.single = len(layouts) == 1 and len(returns) == 1 and not str(returns[0].type).startswith("List")

    def _forget(self, instruction: Sequence[Any], buffers: Sequence[memoryview]) -> None:
        self._plans.clear()

    def _compile(self, name: str, args: Any, kwargs: Any, *, first: int) -> tuple[Callable[[Any], Any], int]:
        """A function of an instruction that calls the operator; and the place after its operands.

        The source has nothing of what was sent: constants are names in its scope.
        """
        scope: dict[str, Any] = {
            "tensors": self._tensors,
            "scalar": _scalar,
            "generator": self._generator,
            "operator": fused.FUNCTIONS.get(name) or _operator(name),
        }
        place = first

        def operand() -> str:
            nonlocal place
            place += 1
            return f"i[{place - 1}]"

        def source(argument: Any) -> str:
            kind = argument[0]
            if kind == wire.TENSOR:
                return f"tensors[{operand()}]"
            if kind == wire.SCALAR_TENSOR:
                return f"scalar({operand()})"
            if kind == wire.VALUE:
                return operand()
            if kind == wire.GENERATOR_ID:
                return f"generator({operand()})"
            if kind == wire.LIST:
                return f"[{','.join(map(source, argument[1]))}]"
            value = (
                getattr(torch, argument[1]) if kind == wire.NAMED else argument[1] if kind == wire.CONSTANT else None
            )
            constant = f"c{len(scope)}"
            scope[constant] = self._device if kind == wire.DEVICE else value
            return constant

        words = [source(argument) for argument in args]
        for key, argument in kwargs:
            if key not in [argument.name for argument in scope["operator"]._schema.arguments]:
                raise RuntimeError(f"{name} has no argument {key!r:.80}")
            words.append(
                f"**{{{key!r}: {source(argument)}}}" if keyword.iskeyword(key) else f"{key}={source(argument)}"
            )
        code = f"lambda i: operator({', '.join(words)})"
        return eval(code, scope), place  # noqa: S307

    def _check(self, plan: _Plan, instruction: Sequence[Any]) -> Any:
        """Executes it and makes the outputs as the client predicts them: their strides may differ between devices.

        A plan whose outputs need no change on its first execution is not checked again.
        """
        inputs = self._operands(plan, instruction)
        shapes = [tensor.shape for tensor in inputs]
        result = plan.call(instruction)
        if shapes != [tensor.shape for tensor in inputs]:
            raise RuntimeError("it has resized a tensor that it was given, and was not expected to")
        outputs = [result] if plan.single else list(result) if plan.layouts else []
        changed = False
        for at, (tensor, layout) in enumerate(zip(outputs, plan.layouts, strict=False)):
            if tensor is None or layout is None:
                continue
            shape, strides, dtype = layout
            if tuple(tensor.shape) != tuple(shape) or _NUMBERS[tensor.dtype] != dtype:
                expected = f"{wire.DTYPES[dtype]}{list(shape)}"
                raise RuntimeError(f"its result is {_shape(tensor)} here and was predicted as {expected}")
            same = all(a == b or n <= 1 for a, b, n in zip(tensor.stride(), strides, shape, strict=True))
            if tensor.numel() and (not same or tensor.storage_offset() or _is_special(tensor)):
                changed = True
                outputs[at] = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(
                    tensor
                )
        plan.checked = not changed
        return outputs[0] if plan.single else outputs

    def _dynamic(self, instruction: Sequence[Any], buffers: Sequence[memoryview]) -> None:
        _, name, args, kwargs, operands, ident = instruction
        call, _ = self._compile(name, args, kwargs, first=0)
        result = call(operands)
        self._reply = {"value": self._keep(result, ident)}

    def _keep(self, value: Any, first: int) -> Any:
        """Keeps the tensors of a result under new ids; returns what the client is told of the result."""
        number = first - 1

        def describe(value: Any) -> Any:
            nonlocal number
            if isinstance(value, torch.Tensor):
                if not hasattr(value, "graph"):
                    value = value.detach().to(self._device)
                    if value.storage_offset() or not is_dense(value) or _is_special(value):
                        value = value.clone(memory_format=torch.contiguous_format)
                number += 1
                self._tensors[number] = value
                return {"tensor": [list(value.shape), list(value.stride()), _NUMBERS[value.dtype]]}
            if value is None or isinstance(value, bool | int | float | str):
                return {"plain": value}
            if isinstance(value, complex):
                return {"complex": [value.real, value.imag]}
            if isinstance(value, dict):
                return {"dict": [[describe(key), describe(item)] for key, item in value.items()]}
            if isinstance(value, tuple | list):
                return {type(value).__name__ if type(value) in (list, tuple) else "tuple": [*map(describe, value)]}
            raise TypeError(f"a {type(value).__qualname__} cannot stay on a device, or be told to the program")

        return describe(value)

    def _hello(self, instruction: Sequence[Any], buffers: Sequence[memoryview]) -> None:
        name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "CPU"
        self._reply = {"value": {"torch": torch.__version__, "name": name}}

    # ---- tensors

    def _view(self, instruction: Sequence[Any], buffers: Sequence[memoryview]) -> None:
        _, ident, base, shape, strides, offset, dtype = instruction
        tensor = self._tensors[base]
        if tensor.dtype is DTYPES[dtype]:
            self._tensors[ident] = torch.as_strided(tensor, shape, strides, offset)
        else:
            empty = torch.empty(0, dtype=DTYPES[dtype], device=self._device)
            self._tensors[ident] = empty.set_(tensor.untyped_storage(), offset, shape, strides)

    def _free(self, instruction: Sequence[Any], buffers: Sequence[memoryview]) -> None:
        for ident in instruction[1:]:
            self._tensors.pop(ident, None)
            self._generators.pop(ident, None)
            if ident in self._iterators:
                self._iterators.pop(ident).close()
            self._transfers.close(ident)

    def _empty(self, instruction: Sequence[Any], buffers: Sequence[memoryview]) -> None:
        _, ident, shape, strides, dtype = instruction
        self._tensors[ident] = torch.empty_strided(shape, strides, dtype=DTYPES[dtype], device=self._device)

    def _make(self, instruction: Sequence[Any], buffers: Sequence[memoryview]) -> None:
        _, ident, shape, dtype, number = instruction
        data = torch.frombuffer(buffers[number], dtype=torch.uint8).view(DTYPES[dtype]).view(shape)
        self._tensors[ident] = data.to(self._device)

    def _upload(self, instruction: Sequence[Any], buffers: Sequence[memoryview]) -> None:
        _, ident, number = instruction
        tensor = self._tensors[ident]
        if tensor.numel():
            data = torch.frombuffer(buffers[number], dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
            tensor.copy_(data)

    def _fetch(self, instruction: Sequence[Any], buffers: Sequence[memoryview]) -> None:
        for ident in instruction[1:]:
            tensor = self._tensors[ident]
            self._buffers.append(bytes_of(tensor))
        self._reply = {"value": None}

    def _sync(self, instruction: Sequence[Any], buffers: Sequence[memoryview]) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._reply = {"value": None, **self._tensors.usage(self._device)}

    # ---- random numbers

    def _generator(self, ident: int) -> torch.Generator | None:
        return self._generators[ident] if ident else None

    def _default_generator(self, ident: int) -> torch.Generator:
        if ident:
            return self._generators[ident]
        return (
            torch.cuda.default_generators[self._device.index]
            if self._device.type == "cuda"
            else torch.default_generator
        )

    def _make_generator(self, instruction: Sequence[Any], buffers: Sequence[memoryview]) -> None:
        self._generators[instruction[1]] = torch.Generator(self._device)

    def _seed(self, instruction: Sequence[Any], buffers: Sequence[memoryview]) -> None:
        _, seed, ident = instruction
        self._default_generator(ident).manual_seed(seed)

    def _state(self, instruction: Sequence[Any], buffers: Sequence[memoryview]) -> None:
        generator = self._default_generator(instruction[1])
        if len(instruction) > 2:
            generator.set_state(torch.frombuffer(buffers[instruction[2]], dtype=torch.uint8).clone())
        else:
            self._buffers.append(bytes_of(generator.get_state()))
            self._reply = {"value": None}

    # ---- other devices

    def _listen(self, instruction: Sequence[Any], buffers: Sequence[memoryview]) -> None:
        self._reply = {"value": self._transfers.listen(instruction)}

    def _connect(self, instruction: Sequence[Any], buffers: Sequence[memoryview]) -> None:
        self._reply = {"value": self._transfers.connect(instruction)}

    def _send(self, instruction: Sequence[Any], buffers: Sequence[memoryview]) -> None:
        self._transfers.send(instruction, self._failed)

    def _receive(self, instruction: Sequence[Any], buffers: Sequence[memoryview]) -> None:
        self._transfers.receive(instruction, self._failed)

    # ---- regions

    def _run(self, instruction: Sequence[Any], buffers: Sequence[memoryview]) -> None:
        _, ident, *numbers = instruction
        with torch.enable_grad():
            function, args, kwargs = _unpickled(numbers, buffers)
            result = function(*args, **kwargs)
        if isinstance(result, types.GeneratorType):
            self._iterators[ident] = RunningGenerator(result)
            self._reply = {"value": {"iterator": None}}
        else:
            self._reply = {"value": self._keep(result, ident)}

    def _next(self, instruction: Sequence[Any], buffers: Sequence[memoryview]) -> None:
        _, iterator, ident = instruction
        found = self._iterators.get(iterator)  # None: it is over, and this was asked for ahead
        values, over = found.next() if found is not None else ([], True)
        if over:
            self._iterators.pop(iterator, None)
        self._reply = {"value": self._keep(values, ident), "over": over}

    def _module(self, instruction: Sequence[Any], buffers: Sequence[memoryview]) -> None:
        _, digest, *numbers = instruction
        fused.MODULES[digest] = _unpickled(numbers, buffers)
        self._reply = {"value": None}

    # ---- calls between batches

    def call(self, first: int, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls a function. If `first` is not 0, the tensors of its result stay, with ids from `first` on."""
        if self._failed:
            raise Lost("it was not called, because of an earlier error")
        result = context.awaited(function(*args, **kwargs))
        return codec.Payload(wire.encode({"value": self._keep(result, first)})) if first else result

    def tensor(self, ident: int) -> torch.Tensor:
        return self._tensors[ident].detach()


def _unpickled(numbers: Sequence[int], buffers: Sequence[memoryview]) -> Any:
    """What was pickled into these buffers."""
    data, *beside = (buffers[number] for number in numbers)
    return codec.loads(data, beside)


def _operator(name: str) -> Any:
    base, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _scalar(operand: Sequence[Any]) -> torch.Tensor:
    return torch.tensor(operand[1], dtype=DTYPES[operand[0]])


def _shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _is_special(tensor: torch.Tensor) -> bool:
    """Whether its elements are not what is in its memory."""
    return bool(tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor())


_EXECUTORS: Final[dict[str, Executor]] = {}


def execute(device: str, batch: Sequence[Sequence[Any]], *buffers: memoryview) -> codec.Payload:
    """What most of the worker's calls run: a batch of instructions."""
    executor = _EXECUTORS.get(device)
    if executor is None:
        executor = _EXECUTORS[device] = Executor(device)
    return executor.execute(batch, buffers)


def call(
    device: str,
    first: int,
    function: Any,
    sources: Mapping[str, str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """What the other ones run: a function of the program. Batches have been executed before."""
    show_lines(sources)
    return _EXECUTORS[device].call(first, getattr(function, "fn", function), args, kwargs)


def tensor(device: str, ident: int, requires_grad: bool, is_parameter: bool) -> torch.Tensor:
    """The tensor that a remote one stands for: a leaf, with the same memory. Raises Lost."""
    found = _EXECUTORS[device].tensor(ident)
    return torch.nn.Parameter(found, requires_grad) if is_parameter else found.requires_grad_(requires_grad)
