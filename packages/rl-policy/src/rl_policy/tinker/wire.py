"""The protobuf messages of the tinker client: `forward_backward` requests, and large results.

The messages are declared here by their field numbers, in a descriptor pool of their own, so that
neither the client nor a compiler of protobuf is needed. Numbers and types are those of
`tinker_public` in version 0.38 of the client.
"""

# protobuf makes message classes at run time, which have no static types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory

from rl_policy.tinker.requests import RequestError

PROTOBUF = "application/x-protobuf"
"""The content type."""

_PACKAGE = "tinker_public"
_KIND = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bytes": _KIND.TYPE_BYTES,
    "string": _KIND.TYPE_STRING,
    "bool": _KIND.TYPE_BOOL,
    "double": _KIND.TYPE_DOUBLE,
    "int32": _KIND.TYPE_INT32,
    "int64": _KIND.TYPE_INT64,
}
# Field: number and type; a leading `*` repeats it, `map:` maps strings, `one:` makes it one of the
# alternatives of its message, `?` gives it presence. Enumerations travel as int32.
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "EncodedTextChunk": {"tokens": (1, "bytes")},
    "Chunk": {
        "encoded_text": (1, "one:EncodedTextChunk"),
        "image": (2, "one:bytes"),
        "dmel": (3, "one:bytes"),
    },
    "Tensor": {
        "dense": (1, "one:bytes"),
        "sparse_csr": (2, "one:bytes"),
        "dtype": (3, "int32"),
        "shape": (4, "*int64"),
    },
    # Spans of provenance, fields 3 and 4, say where tokens come from: no loss here reads them.
    "Datum": {"model_input": (1, "*Chunk"), "loss_fn_inputs": (2, "map:Tensor")},
    "LossConfigValue": {"number": (1, "one:double"), "text": (2, "one:string")},
    "ForwardBackwardRequest": {
        "model_id": (1, "string"),
        "seq_id": (2, "int32"),
        "data": (3, "*Datum"),
        "loss_fn": (4, "string"),
        "loss_fn_config": (5, "map:double"),
        "forward_only": (6, "bool"),
        "loss_fn_config_v2": (7, "map:LossConfigValue"),
    },
    "BatchedTensor": {
        "data": (1, "bytes"),
        "offsets": (2, "bytes"),
        "dtype": (3, "int32"),
        "trailing_shape": (4, "*int64"),
    },
    "ArrayRecord": {
        "type_tag": (1, "string"),
        "fields": (2, "map:BatchedTensor"),
        "num_datums": (3, "int64"),
    },
    "ForwardBackwardOutput": {
        "loss_fn_output_type": (1, "string"),
        "loss_fn_outputs": (2, "*ArrayRecord"),
        "metrics": (3, "map:double"),
    },
    "SampledSequence": {
        "stop_reason": (1, "int32"),
        "tokens": (2, "bytes"),
        "logprobs": (3, "?bytes"),
    },
    "SampleResponse": {"sequences": (1, "*SampledSequence"), "prompt_logprobs": (2, "?bytes")},
}
_FLOAT32, _INT64, _INT32 = 1, 2, 3
_DTYPES = {_FLOAT32: np.dtype("<f4"), _INT64: np.dtype("<i8"), _INT32: np.dtype("<i4")}
_STOP_REASONS = {"stop": 0, "length": 1}
_RECORD = "ArrayRecord"


@dataclass(frozen=True, kw_only=True, slots=True)
class Datum:
    """One training example."""

    tokens: np.ndarray
    """`[n]` int64, the model's input."""
    inputs: dict[str, np.ndarray]
    """`[n]` each: what the loss reads, `target_tokens` int64 and others float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardBackwardCall:
    """A `forward_backward` or `forward` request."""

    model_id: str
    seq_id: int
    loss_fn: str
    loss_config: dict[str, float | str]
    forward_only: bool
    data: list[Datum]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """One sampled sequence."""

    tokens: np.ndarray
    """`[n]` int32."""
    logprobs: np.ndarray
    """`[n]` float32."""
    stop_reason: str
    """`stop` or `length`."""


def address_of_call(body: bytes) -> tuple[str, int, Any]:
    """Return model and number of a `forward_backward` request, and the parsed message.

    Raises:
        RequestError: The body is no such message.
    """
    request = _CLASSES["ForwardBackwardRequest"]()
    try:
        request.ParseFromString(body)
    except message.DecodeError as error:
        raise RequestError(f"the body is no ForwardBackwardRequest: {error}") from None
    return request.model_id, request.seq_id, request


def read_call(request: Any) -> ForwardBackwardCall:
    """Return the content of a message of `address_of_call`.

    Raises:
        RequestError: Names the datum and the key.
    """
    if not request.data:
        raise RequestError("data is empty")
    config: dict[str, float | str] = dict(request.loss_fn_config)
    for key, value in request.loss_fn_config_v2.items():
        config[key] = value.text if value.HasField("text") else value.number
    return ForwardBackwardCall(
        model_id=request.model_id,
        seq_id=request.seq_id,
        loss_fn=request.loss_fn,
        loss_config=config,
        forward_only=request.forward_only,
        data=[_read_datum(datum, f"data[{index}]") for index, datum in enumerate(request.data)],
    )


def write_forward_backward(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """Return the result of a `forward_backward` call.

    Args:
        logprobs: Of each datum's targets, `[n]` float32.
        metrics: `name:reduction` and its value.
    """
    lengths = np.array([0, *(4 * len(each) for each in logprobs)], dtype="<i8")
    record = _CLASSES["ArrayRecord"](type_tag=_RECORD, num_datums=len(logprobs))
    batched = record.fields["logprobs"]
    batched.data = b"".join(each.astype("<f4").tobytes() for each in logprobs)
    batched.offsets = lengths.cumsum().astype("<i8").tobytes()
    batched.dtype = _FLOAT32
    output = _CLASSES["ForwardBackwardOutput"](
        loss_fn_output_type=_RECORD, loss_fn_outputs=[record], metrics=metrics
    )
    return output.SerializeToString()


def write_samples(
    sequences: Sequence[Sampled], *, prompt_logprobs: np.ndarray | None = None
) -> bytes:
    """Return the result of a sampling call.

    Args:
        sequences: The samples.
        prompt_logprobs: `[prompt]` float32, NaN where there is none.
    """
    response = _CLASSES["SampleResponse"]()
    for each in sequences:
        response.sequences.add(
            stop_reason=_STOP_REASONS[each.stop_reason],
            tokens=each.tokens.astype("<i4").tobytes(),
            logprobs=each.logprobs.astype("<f4").tobytes(),
        )
    if prompt_logprobs is not None:
        response.prompt_logprobs = prompt_logprobs.astype("<f4").tobytes()
    return response.SerializeToString()


def _read_datum(datum: Any, name: str) -> Datum:
    tokens: list[np.ndarray] = []
    for index, chunk in enumerate(datum.model_input):
        kind = chunk.WhichOneof("one")
        if kind != "encoded_text":
            raise RequestError(
                f"{name}.model_input.chunks[{index}] is of kind {kind!r}: only text is supported"
            )
        tokens.append(_from_bytes(chunk.encoded_text.tokens, _INT32, f"{name}.model_input"))
    joined = np.concatenate(tokens).astype(np.int64) if tokens else np.zeros(0, np.int64)
    if not len(joined):
        raise RequestError(f"{name}.model_input has no tokens")
    inputs = {
        key: _read_tensor(tensor, f"{name}.loss_fn_inputs[{key!r}]", length=len(joined))
        for key, tensor in datum.loss_fn_inputs.items()
    }
    return Datum(tokens=joined, inputs=inputs)


def _read_tensor(tensor: Any, name: str, *, length: int) -> np.ndarray:
    shape = list(tensor.shape)
    if tensor.WhichOneof("one") == "sparse_csr" or len(shape) > 1:
        raise RequestError(f"{name} has shape {shape}: only one dimension is supported")
    values = _from_bytes(tensor.dense, tensor.dtype, name)
    if len(values) != length or shape not in ([], [length]):
        raise RequestError(
            f"{name} has {len(values)} values and shape {shape}, and model_input {length} tokens"
        )
    return values


def _from_bytes(content: bytes, dtype: int, name: str) -> np.ndarray:
    kind = _DTYPES.get(dtype)
    if kind is None:
        raise RequestError(f"{name} has dtype {dtype}: known are 1 float32, 2 int64, 3 int32")
    if len(content) % kind.itemsize:
        raise RequestError(f"{name} has {len(content)} bytes, no multiple of {kind.itemsize}")
    return np.frombuffer(content, dtype=kind)


def _build() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="rl_policy_tinker.proto", package=_PACKAGE, syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        _declare(file.message_type.add(name=name), fields)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _MESSAGES
    }


def _declare(entry: Any, fields: Mapping[str, tuple[int, str]]) -> None:
    is_choice = any(kind.startswith("one:") for _, kind in fields.values())
    if is_choice:
        entry.oneof_decl.add(name="one")
    for name, (number, kind) in fields.items():
        field = entry.field.add(name=name, number=number, label=_KIND.LABEL_OPTIONAL)
        if kind.startswith("map:"):
            nested_name = "".join(part.title() for part in name.split("_")) + "Entry"
            nested = entry.nested_type.add(name=nested_name)
            nested.options.map_entry = True
            for place, of in ((1, "string"), (2, kind.removeprefix("map:"))):
                part = nested.field.add(
                    name=("key", "value")[place - 1], number=place, label=_KIND.LABEL_OPTIONAL
                )
                _set_type(part, of)
            field.label = _KIND.LABEL_REPEATED
            field.type = _KIND.TYPE_MESSAGE
            field.type_name = f".{_PACKAGE}.{entry.name}.{nested_name}"
            continue
        if kind.startswith("*"):
            field.label = _KIND.LABEL_REPEATED
        elif kind.startswith("one:"):
            field.oneof_index = 0
        elif kind.startswith("?"):
            field.oneof_index = len(entry.oneof_decl)
            field.proto3_optional = True
            entry.oneof_decl.add(name=f"_{name}")
        _set_type(field, kind.removeprefix("one:").lstrip("*?"))


def _set_type(field: Any, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _KIND.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}.{kind}"


_CLASSES = _build()
