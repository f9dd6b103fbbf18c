"""The worker of a device: executes the client's instructions with real tensors on a host.

It is an ordinary worker process whose calls are batches of instructions. After an error it skips everything until the
client has raised it: the state stays as if the program had stopped at that instruction.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from skyfab import context
from skyfab.host.agent import cuda
from skyfab.host.channel import ChannelBroken
from skyfab.host.device import composite_host, wire
from skyfab.host.device.generators import RunningGenerator, own_defaults
from skyfab.host.device.host_results import describe_result, version
from skyfab.host.device.memory import DTYPES, Failure, Lost, Tensors, bytes_of
from skyfab.host.device.p2p_host import TensorChannels
from skyfab.host.device.worker_plans import WorkerPlan
from skyfab.protocol import codec

_TEXT: Final = 8000
_NAMES: Final = {wire.RUN: "run_on", wire.NEXT: "run_on", wire.EMPTY: "empty", wire.MODULE: "remote"} | dict.fromkeys(
    (wire.SEND, wire.RECEIVE), "copy_"
)
"""What a program called, for instructions that are not operators."""


class Executor:
    """The tensors and plans of one device."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._tensors = Tensors()
        self._plans: dict[int, WorkerPlan] = {}
        self._forgotten = 0
        """The last plan when the program last forgot its plans."""
        self._generators: dict[int, torch.Generator] = {}
        """0 is the device's own."""
        self._iterators: dict[int, RunningGenerator] = {}
        """Generators of functions that a program iterates over."""
        self._given: dict[int, tuple[torch.Tensor, int]] = {}
        """The program's tensors that a function is called with, by id, with their versions before the call."""
        self._channels = TensorChannels(self._tensors, self._device)
        self.close = self._channels.close_all
        self.tensors = self._tensors.values
        self._failure: Failure | None = None
        """Why instructions are not executed; None if they are."""
        self._reply: Any = None
        self._buffers: list[memoryview] = []
        """Bytes of the reply."""
        self._uploads: Sequence[memoryview] = ()
        """Bytes that came with the batch."""
        self._handlers: dict[int, Callable[[Sequence[Any]], None]] = {
            code: getattr(self, f"_{name.lower()}") for name, code in wire.INSTRUCTIONS.items()
        }
        self._scope = {"device": self._device, "tensors": self._tensors, "generator": self._generators.__getitem__}
        if self._device.type == "cuda" and torch.cuda.is_available():  # else the client refuses the host: see `_hello`
            torch.cuda.set_device(self._device)
            self._generators[0] = torch.cuda.default_generators[self._device.index]
        else:
            self._generators[0] = torch.default_generator

    def execute(self, batch: Sequence[Sequence[Any]], buffers: Sequence[memoryview]) -> codec.Payload:
        """Executes a batch. The reply is empty, or what the last instruction that replies has to say."""
        self._reply, self._buffers, self._uploads = None, [], buffers
        plans, tensors = self._plans, self._tensors
        at = 0
        with torch.no_grad():
            for at, instruction in enumerate(batch):
                try:
                    number = instruction[0]
                    if number < 0:
                        self._handle(number, instruction)
                    elif self._failure is None:
                        plan = plans[number]
                        result = plan.call(instruction) if plan.checked else plan.check(instruction, tensors)
                        if plan.single:
                            tensors[instruction[plan.first_output]] = result
                        elif plan.layouts:
                            for ident, tensor in zip(instruction[plan.first_output :], result, strict=False):
                                if ident and tensor is not None:
                                    tensors[ident] = tensor
                    else:
                        tensors.lose(self._outputs(instruction), self._failure)
                except (Exception, SystemExit) as error:  # sys.exit() in a function must not end all tensors
                    if cuda.is_unusable(error):
                        raise  # the process ends, and the client learns that its tensors are lost
                    if self._failure is None:
                        self._failure = Failure(f"{type(error).__name__}: {error}")
                        self._reply, self._buffers = {"error": self._describe(error, instruction, at)}, []
                    tensors.lose(self._outputs(instruction), self._failure)
                    error.with_traceback(None)
        self._uploads = ()
        if self._given:
            if self._reply is not None:
                self._reply["changed"] = self._changed()
            self._given = {}
        data = b"" if self._reply is None else wire.encode(self._reply)
        return codec.Payload(data, self._buffers)

    def _handle(self, code: int, instruction: Sequence[Any]) -> None:
        if self._failure is None or code in wire.REMEMBERED:
            self._handlers[code](instruction)
        else:
            self._tensors.lose(self._outputs(instruction), self._failure)

    def _describe(self, error: BaseException, instruction: Sequence[Any], at: int) -> dict[str, Any]:
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
            "inputs": plan.shown(instruction, self._tensors) if plan is not None else [],
            **self._tensors.usage(self._device),
        }

    # ---- after an error

    def _outputs(self, instruction: Sequence[Any]) -> Sequence[int]:
        """The ids of tensors that an instruction would make."""
        code = instruction[0]
        if code >= 0:
            plan = self._plans.get(code)
            return instruction[plan.first_output :] if plan is not None else ()
        if code == wire.RECEIVE:
            return (instruction[3],) if instruction[4] is not None else ()
        return (instruction[1],) if code in (wire.EMPTY, wire.MAKE) else ()

    def _written(self, instruction: Sequence[Any]) -> Sequence[int]:
        """The ids of tensors that an instruction may change."""
        code = instruction[0]
        if code >= 0:
            plan = self._plans.get(code)
            return plan.written(instruction) if plan is not None else [i for i in instruction[1:] if type(i) is int]
        if code == wire.RECEIVE:
            return (instruction[3],) if instruction[4] is None else ()
        return (instruction[1],) if code == wire.UPLOAD else ()

    def _resume(self, instruction: Sequence[Any]) -> None:
        _, text, changes = instruction
        failure, self._failure = self._failure or Failure(text), None
        failure.text = text
        self._tensors.lose_memory([ident for each in changes for ident in self._written(each)], failure)

    # ---- plans

    def _plan(self, instruction: Sequence[Any]) -> None:
        _, number, name, args, kwargs, layouts = instruction
        self._plans[number] = WorkerPlan(self._scope, name, args, kwargs, layouts, first=1)

    def _forget(self, _: Sequence[Any]) -> None:
        """Plans since the last time stay: another thread of the program may be about to use one."""
        last = max(self._plans, default=0)
        for number in [number for number in self._plans if number <= self._forgotten]:
            del self._plans[number]
        self._forgotten = last

    def _dynamic(self, instruction: Sequence[Any]) -> None:
        _, name, args, kwargs, operands, ident = instruction
        result = WorkerPlan(self._scope, name, args, kwargs, (), first=0).call(operands)
        self._reply = {"value": self._keep(result, ident)}

    def _keep(self, value: Any, first: int) -> Any:
        """Keeps the tensors of a result under new ids; returns what is replied to the client."""
        given = {ident: tensor for ident, (tensor, _) in self._given.items()}
        bases, document = describe_result(value, self._device, given)
        self._tensors.update(enumerate(bases, first))
        return document

    def _settings(self, instruction: Sequence[Any]) -> None:
        _, dtype, precision, mode = instruction
        torch.set_default_dtype(DTYPES[dtype])
        if precision:
            torch.set_float32_matmul_precision(precision)
        torch.set_deterministic_debug_mode(mode)

    def _hello(self, _: Sequence[Any]) -> None:
        usable = self._device.type == "cpu" or torch.cuda.is_available()
        self._reply = {"value": {"torch": torch.__version__, "device": str(self._device), "usable": usable}}

    # ---- tensors

    def _view(self, instruction: Sequence[Any]) -> None:
        _, ident, base, *layout = instruction
        self._tensors.view(ident, base, tuple(layout))

    def _free(self, instruction: Sequence[Any]) -> None:
        for ident in instruction[1:]:
            if self._tensors.pop(ident, None) is not None:
                continue  # a tensor, as nearly always
            for each in (ident,) if ident > 0 else self._of_block(-ident):
                self._tensors.free(each)
                self._generators.pop(each, None)
                if each in self._iterators:
                    self._iterators.pop(each).close()
                self._channels.close(each)

    def _of_block(self, first: int) -> list[int]:
        """The ids of a block that are in use."""
        block = range(first, first + wire.BLOCK)
        return [ident for ident in (*self._tensors, *self._iterators) if ident in block]

    def _empty(self, instruction: Sequence[Any]) -> None:
        _, ident, shape, strides, dtype = instruction
        self._tensors[ident] = torch.empty_strided(shape, strides, dtype=DTYPES[dtype], device=self._device)

    def _make(self, instruction: Sequence[Any]) -> None:
        _, ident, shape, dtype, number = instruction
        data = torch.frombuffer(self._uploads[number], dtype=torch.uint8).view(DTYPES[dtype]).view(shape)
        self._tensors[ident] = data.to(self._device)

    def _upload(self, instruction: Sequence[Any]) -> None:
        _, ident, number = instruction
        tensor = self._tensors[ident]
        if tensor.numel():
            data = torch.frombuffer(self._uploads[number], dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
            tensor.copy_(data)

    def _fetch(self, instruction: Sequence[Any]) -> None:
        self._buffers.append(bytes_of(self._tensors[instruction[1]]))
        self._reply = {"value": None}

    def _sync(self, _: Sequence[Any]) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._reply = {"value": None, **self._tensors.usage(self._device)}

    # ---- random numbers

    def _generator(self, instruction: Sequence[Any]) -> None:
        self._generators[instruction[1]] = torch.Generator(self._device)

    def _seed(self, instruction: Sequence[Any]) -> None:
        _, seed, ident = instruction
        self._generators[ident].manual_seed(seed)

    def _state(self, instruction: Sequence[Any]) -> None:
        generator = self._generators[instruction[1]]
        if len(instruction) > 2:
            generator.set_state(torch.frombuffer(self._uploads[instruction[2]], dtype=torch.uint8).clone())
        else:
            self._buffers.append(bytes_of(generator.get_state()))
            self._reply = {"value": None}

    # ---- other devices

    def _listen(self, instruction: Sequence[Any]) -> None:
        self._reply = {"value": self._channels.listen(instruction)}

    def _connect(self, instruction: Sequence[Any]) -> None:
        self._reply = {"value": self._channels.connect(instruction)}

    def _send(self, instruction: Sequence[Any]) -> None:
        self._channels.send(instruction, self._failure.text if self._failure else "")

    def _receive(self, instruction: Sequence[Any]) -> None:
        self._channels.receive(instruction, is_wanted=self._failure is None)
        if self._failure is not None:
            self._tensors.lose(self._outputs(instruction), self._failure)

    # ---- remote functions

    def _run(self, instruction: Sequence[Any]) -> None:
        _, ident, *numbers = instruction
        with torch.enable_grad(), own_defaults():
            function, args, kwargs = self._unpickled(numbers)
            result = function(*args, **kwargs)
        if isinstance(result, types.GeneratorType):
            given = {ident: tensor for ident, (tensor, _) in self._given.items()}
            self._iterators[ident] = RunningGenerator(result, given)
            self._reply = {"value": {"iterator": None}}
        else:
            self._reply = {"value": self._keep(result, ident)}

    def _next(self, instruction: Sequence[Any]) -> None:
        _, iterator, ident = instruction
        found = self._iterators.get(iterator)  # None: it is over, and this was asked for ahead
        if found is not None:
            self._given = {each: (tensor, version(tensor)) for each, tensor in found.given.items()}
        values, over = found.next() if found is not None else ([], True)
        if over:
            self._iterators.pop(iterator, None)
        self._reply = {"value": self._keep(values, ident), "over": over}

    def _module(self, instruction: Sequence[Any]) -> None:
        _, digest, *numbers = instruction
        found = self._unpickled(numbers)
        module = found if isinstance(found, torch.nn.Module) else found()
        composite_host.MODULES[digest] = composite_host.HostModule(module)
        self._reply = {"value": None}

    def _unpickled(self, numbers: Sequence[int]) -> Any:
        """What was pickled into these buffers of the batch."""
        data, *buffers = (self._uploads[number] for number in numbers)
        return codec.loads(data, buffers)

    # ---- calls between batches

    def call(self, first: int, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Calls a function. Returns its result, and the ids of tensors that it has changed.

        If `first` is not 0, the tensors of its result stay, with ids from `first` on.
        """
        try:
            if self._failure is not None:
                raise Lost(f"not called {self._failure}")
            with own_defaults():
                result = context.awaited(function(*args, **kwargs))
            if first:
                return codec.Payload(wire.encode({"value": self._keep(result, first), "changed": self._changed()}))
            return result, self._changed()
        finally:
            self._given = {}

    def tensor(self, ident: int) -> torch.Tensor:
        """A tensor for a function that is about to be called."""
        found = self._tensors[ident]
        self._given[ident] = found, version(found)
        return found.detach()

    def _changed(self) -> list[int]:
        """The ids of tensors that the function has changed in place: autograd in the program must know."""
        return [ident for ident, (tensor, before) in self._given.items() if version(tensor) != before]


_executors: Final[dict[str, Executor]] = {}


def executor(device: str) -> Executor:
    """The executor of a device of this host."""
    found = _executors.get(device)
    if found is None:
        found = _executors[device] = Executor(device)
    return found


def begin(name: str, device: str) -> None:
    """Frees all that a program has in this process. The next one may call this device of the host by a `name`."""
    for found in _executors.values():
        found.close()
    _executors.clear()
    composite_host.MODULES.clear()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    _executors[name] = _executors[device] = Executor(device)
