"""The JSON requests of the tinker client, checked.

A key that is not known here belongs to another version of the client. It is ignored if its value
says nothing (null, false, 0, or empty), and refused otherwise.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

# Numbers with which neither arithmetic nor a file system gets into trouble.
_MOST = 2**31 - 1
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$")]
_Id = Annotated[str, Field(min_length=1, max_length=256)]
_Count = Annotated[int, Field(ge=0, le=_MOST)]
_TTL_S = Annotated[int, Field(ge=1, le=10 * 366 * 86400)]
_Token = Annotated[int, Field(ge=0, le=_MOST)]
_Metadata = Annotated[dict[str, str], Field(max_length=64)]


class RequestError(ValueError):
    """A request that cannot be carried out; the client gets the message."""


class Request(BaseModel):
    """A request's body."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _drop_silent_keys(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            raise ValueError(f"expected an object, got {type(values).__name__}")
        names = {name for key, info in cls.model_fields.items() for name in (key, info.alias)}
        for key, value in values.items():
            if key not in names and key != "type" and value not in (None, False, 0, "", [], {}):
                raise ValueError(f"{key}={value!r} is not supported by this server")
        return values


class EmptyRequest(Request):
    """A request of which nothing is read."""

    @model_validator(mode="before")
    @classmethod
    def _drop_silent_keys(cls, values: Any) -> Any:
        return {}


class ByModel(Request):
    """A request about a training client's model."""

    model_id: _Id


class Numbered(ByModel):
    """One of the requests of a model, which are carried out in the order of their numbers."""

    seq_id: _Count


class NumberAlone(Numbered):
    """The number of a request, the rest of which is not read."""

    @model_validator(mode="before")
    @classmethod
    def _drop_silent_keys(cls, values: Any) -> Any:
        return values


class Heartbeat(Request):
    """A session's sign of life."""

    session_id: _Id


class LoraSettings(Request):
    """The adapters of a new model."""

    rank: Annotated[int, Field(ge=1, le=_MOST)]
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    @property
    def layers(self) -> list[str]:
        """The kinds of layers that are trained."""
        kinds = {"attention": self.train_attn, "mlp": self.train_mlp}
        return [kind for kind, is_trained in kinds.items() if is_trained]

    @model_validator(mode="after")
    def _check(self) -> LoraSettings:
        if not self.layers:
            raise ValueError(
                "train_attn=False and train_mlp=False: nothing would be trained, as the output "
                "layer has no adapters"
            )
        return self


class OptimizerKind(Request):
    """The optimizer of a new model."""

    type: str = "adamw"


class CreateModel(Request):
    """A new model: a set of adapters."""

    session_id: _Id
    model_seq_id: _Count
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraSettings | None = None
    optimizer_config: OptimizerKind = OptimizerKind()


class AdamSettings(Request):
    """The settings of one optimizer step."""

    learning_rate: Annotated[float, Field(ge=0)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    # At 0 in float32 a parameter that has no gradient yet would become 0 / 0.
    eps: Annotated[float, Field(ge=1e-30)] = 1e-12
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip_norm: Annotated[float, Field(ge=0)] = 0.0


class OptimStep(Numbered):
    """An optimizer step."""

    adam_params: AdamSettings


class SaveWeights(Numbered):
    """A checkpoint of adapters and optimizer state."""

    path: _Name
    ttl_seconds: _TTL_S | None = None
    overwrite: bool = False
    user_metadata: _Metadata | None = None


class SaveForSampler(Numbered):
    """A checkpoint of adapters, or a sampler of the adapters as they are now."""

    path: _Name | None = None
    sampling_session_seq_id: _Count | None = None
    kind: Annotated[str, Field(pattern="^(snapshot|inflight)$")] = "snapshot"
    ttl_seconds: _TTL_S | None = None
    user_metadata: _Metadata | None = None


class LoadWeights(Request):
    """A checkpoint that a model continues from: an existing one, or a new one of a session."""

    path: str
    optimizer: bool
    model_id: _Id | None = None
    seq_id: _Count | None = None
    session_id: _Id | None = None
    model_seq_id: _Count | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerKind | None = None


class CreateSampler(Request):
    """A sampler of the base model, or of a checkpoint."""

    session_id: _Id
    sampling_session_seq_id: _Count
    base_model: str | None = None
    model_path: str | None = None


class JoinSampler(Request):
    """Another client of a sampler."""

    sampling_session_id: _Id


class TextChunk(Request):
    """A part of a prompt."""

    type: str = "encoded_text"
    tokens: list[_Token]


class Prompt(Request):
    """The tokens of a prompt."""

    chunks: list[TextChunk]

    @property
    def tokens(self) -> list[int]:
        """All tokens."""
        return [token for chunk in self.chunks for token in chunk.tokens]


class SamplingSettings(Request):
    """How tokens are sampled."""

    max_tokens: Annotated[int, Field(ge=1, le=_MOST)] | None = None
    seed: Annotated[int, Field(ge=0, le=2**62)] | None = None
    stop: str | list[str] | list[_Token] | None = None
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=_MOST)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class Sample(Request):
    """Some samples of one prompt."""

    sampling_session_id: _Id
    seq_id: Annotated[int, Field(ge=0, le=2**63 - 1)]
    num_samples: Annotated[int, Field(ge=1, le=4096)] = 1
    prompt: Prompt
    sampling_params: SamplingSettings
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: Annotated[int, Field(ge=1, le=_MOST)] | None = None
    record_stability_info: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> Sample:
        if self.record_stability_info:
            raise ValueError(
                "record_stability_info=True belongs to the loss 'stable_reinforce', which this "
                "server does not have: train with 'importance_sampling', 'ppo' or 'cispo'"
            )
        length, last = len(self.prompt.tokens), self.prompt_logprobs_last_n
        if not length:
            raise ValueError("prompt has no tokens")
        if last is not None and (not self.prompt_logprobs or last > length - 1):
            raise ValueError(
                f"prompt_logprobs_last_n={last} needs prompt_logprobs and must be within "
                f"1..{length - 1}, as the prompt has {length} tokens"
            )
        return self


class RetrieveFuture(Request):
    """The result of an earlier request, if it is there."""

    request_id: _Id
    allow_metadata_only: bool = False


class CancelFuture(Request):
    """A result that nobody waits for any more."""

    request_id: _Id


class WeightsInfo(Request):
    """What a checkpoint is of."""

    tinker_path: str


RequestT = TypeVar("RequestT", bound=Request)


def parse(kind: type[RequestT], body: bytes) -> RequestT:
    """Return a checked request.

    Raises:
        RequestError: The body is no JSON, or a value is wrong; names key and value.
    """
    try:
        values = json.loads(body) if body else {}
    # RecursionError: brackets by the thousand.
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is no JSON: {error}") from None
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise RequestError("; ".join(_describe(entry) for entry in error.errors())) from None


def _describe(entry: Any) -> str:
    key = ".".join(str(part) for part in entry["loc"])
    text = entry["msg"].removeprefix("Value error, ")
    if entry["type"] == "value_error":
        return f"{key}: {text}" if key else text
    value = repr(entry["input"])
    return f"{key}={value if len(value) <= 80 else value[:77] + '...'}: {text}"
