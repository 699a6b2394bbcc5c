"""Fuzz target: the weight cache's messages and safetensors headers. Whatever the bytes, a typed error or a true layout.

Run it for as long as you like: ``python tests/fuzz/fuzz_weights.py tests/fuzz/corpus/weights -max_total_time=600``.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["warmseed.daemon.weights"]):
    from warmseed.daemon.weights.errors import CheckpointInvalid, MessageRefused
    from warmseed.daemon.weights.frames import decode
    from warmseed.daemon.weights.layout import check_layout, end_of, overlap_groups
    from warmseed.daemon.weights.messages import Answer, Request, State
    from warmseed.daemon.weights.safetensors import check_header

__all__ = ["one_input"]


def one_input(data: bytes) -> None:
    """Raise if any of the rules is broken by `data`."""
    for kind in (Request, Answer):
        try:
            message = decode(data, kind, "peer")
            if isinstance(message, State):
                check_layout(message.segments, message.tensors, message.aliases)
                _true(message)
        except MessageRefused as error:
            _printable(error)
    try:
        check_header(data, 8 + len(data) + 64, "x.safetensors")
    except CheckpointInvalid as error:
        _printable(error)


def _true(state: State) -> None:
    for tensor in state.tensors:
        if (end := end_of(tensor)) > tensor.offset and end > state.segments[tensor.segment].nbytes:
            raise ValueError("a tensor past its segment was accepted")
    if sum(map(len, overlap_groups(state.tensors))) != len(state.tensors):
        raise ValueError("a tensor was lost or doubled")


def _printable(error: Exception) -> None:
    if not str(error).isprintable():
        raise ValueError("foreign control characters in a message for the log")


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
