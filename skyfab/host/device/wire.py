"""What the client and the worker of a device agree on: instructions, dtypes, and the encoding of replies.

A batch is a list of instructions. The first item of each is the number of a plan, 0 or more, or one of the negative
codes below. Batches are pickled, because a host trusts its client. Replies are JSON and raw bytes: the client parses
nothing that could run code.
"""

from __future__ import annotations

import json
from typing import Any, Final

from skyfab.errors import ProtocolError

VIEW: Final = -1
"""id, id of the storage's first tensor, shape, strides, offset, dtype: another view of the same storage."""
FREE: Final = -2
"""ids: they are no longer used. A negative one is that of a block: all of its ids."""
PLAN: Final = -3
"""number, operator, arguments, keyword arguments, layouts of the outputs: how to execute a kind of instruction."""
DYNAMIC: Final = -4
"""operator, arguments, keyword arguments, operands, first id: executes it and replies with what it returned."""
MAKE: Final = -18
"""id, shape, dtype, number of the buffer: makes a tensor of bytes that were sent."""
EMPTY: Final = -5
"""id, shape, strides, dtype: allocates a tensor."""
UPLOAD: Final = -6
"""id, number of the buffer: writes bytes into a tensor."""
FETCH: Final = -7
"""id: replies with its bytes."""
SEED: Final = -8
"""seed, id of the generator or 0 for the default one."""
SYNC: Final = -9
"""Replies when everything before it has been executed, with the use of memory."""
RESUME: Final = -10
"""text, instructions: the program knows of the error, which is this text, and instructions that follow are executed
again. Tensors that these skipped instructions would have changed are lost."""
RUN: Final = -11
"""first id, numbers of buffers: calls a function with the host's own tensors, and replies with what it returned, and
with the ids of the tensors that it has changed in place."""
GENERATOR: Final = -12
"""id: makes a random number generator."""
STATE: Final = -13
"""id of a generator or 0: replies with its state; with the number of a buffer, sets it."""
FORGET: Final = -14
"""The program has forgotten its plans: those from before the last FORGET are not used again."""
HELLO: Final = -15
"""Replies with the version of torch."""
NEXT: Final = -16
"""id of a generator that RUN has returned, first id: replies with the values of the next moments, and if it is over."""
MODULE: Final = -17
"""digest, numbers of buffers: keeps a module, or what a function returns that makes it, without its tensors."""
LISTEN: Final = -19
"""id of a new channel, name of the other host, certificate, key, addresses: waits for the other end of the channel at
a port of each address, and replies with the ports."""
CONNECT: Final = -20
"""id of a new channel, name of the other host, certificate, key, pairs of address and port: connects to the other end,
and replies whether it reached it."""
SEND: Final = -21
"""id of a channel, number of the copy, id of a tensor: sends it to another device."""
RECEIVE: Final = -22
"""id of a channel, number of the copy, id of a tensor, its shape, strides and dtype if it is a new one (else None),
shape and dtype of what comes, and its size in bytes."""
SETTINGS: Final = -25
"""default dtype, precision of products of float32 or an empty string, mode of deterministic algorithms: as in the
program."""

INSTRUCTIONS: Final = {name: code for name, code in list(globals().items()) if type(code) is int and code < 0}
"""The codes by name."""
BLOCK: Final = 1 << 20
"""Ids in a block: for results of which only the host knows how many tensors they have."""
REMEMBERED: Final = frozenset((VIEW, FREE, PLAN, GENERATOR, FORGET, SEND, RECEIVE, RESUME, SETTINGS))
"""Instructions that are executed after an error too, and change no values then: both sides remember their ids; the
other end of a channel learns that a copy does not take place."""

DTYPES: Final = {
    "float32": 2,
    "float64": 2,
    "float16": 2,
    "bfloat16": 4,
    "int64": 0,
    "int32": 0,
    "int16": 0,
    "int8": 0,
    "uint8": 1,
    "bool": 6,
    "complex64": 5,
    "complex128": 5,
    "uint16": 1,
    "uint32": 1,
    "uint64": 1,
    "float8_e4m3fn": 10,
    "float8_e5m2": 12,
    "complex32": 5,
}
"""The dtypes with DLPack's codes for their kind. A dtype's number is its place."""

# Kinds of arguments in a plan. Operands are items of the instruction, in order; the others are part of the plan.
TENSOR: Final = "t"
"""An operand: the id of a tensor."""
SCALAR_TENSOR: Final = "c"
"""An operand: the dtype and value of a tensor without dimensions that is in the client's memory."""
VALUE: Final = "v"
"""An operand: a number, or a list of numbers."""
GENERATOR_ID: Final = "g"
"""An operand: the id of a generator, 0 for the default one."""
LIST: Final = "l"
"""A list of arguments."""
CONSTANT: Final = "k"
"""A constant: None, a number, a string, a dtype, a layout, a memory format, or a list of them."""
DEVICE: Final = "d"
"""The device itself."""

_LARGEST: Final = 1 << 24
"""Bytes of JSON in a reply."""


def encode(document: Any) -> bytes:
    """Encodes the document of a reply."""
    return json.dumps(document, separators=(",", ":")).encode()


def decode(data: bytes | memoryview) -> Any:
    """Decodes the document of a reply. Raises ProtocolError for anything else."""
    if len(data) > _LARGEST:
        raise ProtocolError(f"reply of a device too large: {len(data)} bytes")
    try:
        return json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        raise ProtocolError("invalid reply of a device: not JSON") from error
