"""Batched generation: sample a token per row, stop, assemble the rows."""

# torch and transformers annotate some of their functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from rl_batched_data import BatchedDataDict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rl_interfaces.config.types import ResolvedConfig
    from rl_interfaces.generation import SamplingOptions

# Rows that have ended are dropped when they are an eighth: what is dropped costs a copy of the rest
# of the cache, which a forward pass reads as a whole too.
_MOST_KEPT = 7 / 8


class Decoder(Protocol):
    """Incremental forward passes over some rows, with a key-value cache."""

    def prefill(self, prompts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return the logits of the token after each prompt, `[rows, vocab]`.

        Args:
            prompts: `[rows, seq]` int64, right-padded.
            lengths: `[rows]` int64.
        """
        ...

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append `tokens`, `[rows]` int64, and return the next logits, `[rows, vocab]`."""
        ...

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with some of the rows, `[kept]` int64, ascending; the others have ended."""
        ...


class Repeats(NamedTuple):
    """Which rows of a batch have the same prompt: the samples of a group need one prefill.

    Example, the prompts `a b a`: first = [0, 1], copies = [0, 1, 0]
    """

    first: torch.Tensor
    """`[prompts]` int64: the first row of each prompt, ascending."""
    copies: torch.Tensor
    """`[rows]` int64: where each row's prompt is in `first`."""


def find_repeats(prompts: torch.Tensor, lengths: torch.Tensor) -> Repeats | None:
    """Return which rows repeat a prompt, on the prompts' device; None if all differ.

    Args:
        prompts: `[rows, seq]` int64, right-padded.
        lengths: `[rows]` int64.
    """
    tokens = prompts.cpu().numpy()
    first: dict[bytes, int] = {}
    copies: list[int] = []
    rows: list[int] = []
    for row, length in enumerate(lengths.tolist()):
        place = first.setdefault(tokens[row, :length].tobytes(), len(rows))
        if place == len(rows):
            rows.append(row)
        copies.append(place)
    if len(rows) == len(copies):
        return None
    return Repeats(*(torch.tensor(each, device=prompts.device) for each in (rows, copies)))


class FullForwardDecoder:
    """A `Decoder` without a cache: every step runs the model on all previous tokens.

    Args:
        forward: Maps right-padded tokens `[rows, seq]` to logits `[rows, seq, vocab]`.
    """

    def __init__(self, forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._forward = forward

    def prefill(self, prompts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """See `Decoder.prefill`."""
        self._tokens, self._lengths = prompts, lengths
        return self._next_logits()

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """See `Decoder.step`."""
        if int(self._lengths.max()) == self._tokens.shape[1]:
            # 16 columns at a time: one per token would copy all tokens in every step.
            self._tokens = torch.nn.functional.pad(self._tokens, (0, 16))
        self._tokens = self._tokens.scatter(1, self._lengths[:, None], tokens[:, None])
        self._lengths = self._lengths + 1
        return self._next_logits()

    def keep(self, rows: torch.Tensor) -> None:
        """See `Decoder.keep`."""
        self._tokens, self._lengths = self._tokens[rows], self._lengths[rows]

    def _next_logits(self) -> torch.Tensor:
        rows = torch.arange(len(self._tokens), device=self._tokens.device)
        return self._forward(self._tokens)[rows, self._lengths - 1]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    """The sampling parameters of a worker's own generation."""

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int | None
    stop_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    pad_token_id: int | None
    batch_size: int
    """Rows per forward pass."""
    stops_at_end: bool = True
    """Whether the model's end tokens end a row."""

    def changed(self, options: SamplingOptions) -> SamplingConfig:
        """Return this with the sampling parameters of one call."""
        return replace(
            self,
            max_new_tokens=options["max_new_tokens"],
            temperature=options["temperature"],
            top_p=options["top_p"],
            top_k=options["top_k"],
            stop_token_ids=tuple(options["stop_token_ids"]),
            stop_strings=tuple(options["stop_strings"]),
            stops_at_end=options["stops_at_end"],
        )

    @classmethod
    def from_policy_config(cls, resolved: ResolvedConfig) -> SamplingConfig | None:
        """Parse the section `generation`; None if the policy does not generate.

        A completion ends where its row has `max_total_sequence_length` tokens, so that
        `max_new_tokens` may be as many: the reference's examples all say so.

        Raises:
            ValueError: `max_new_tokens` is more than a row may have.
        """
        generation = resolved.get("generation")
        if generation is None:
            return None
        longest = resolved.get("max_total_sequence_length")
        if longest is not None and generation["max_new_tokens"] > longest:
            raise ValueError(
                f"policy.generation.max_new_tokens={generation['max_new_tokens']} is more than "
                f"policy.max_total_sequence_length={longest}"
            )
        return cls(
            max_new_tokens=generation["max_new_tokens"],
            temperature=float(generation["temperature"]),
            top_p=float(generation["top_p"]),
            top_k=generation.get("top_k"),
            stop_token_ids=tuple(generation.get("stop_token_ids") or ()),
            stop_strings=tuple(generation.get("stop_strings") or ()),
            pad_token_id=generation.get("pad_token_id"),
            batch_size=resolved["generation_batch_size"],
        )


def scoring_temperature(sampling: SamplingConfig | None) -> float:
    """Return what divides the logits of every log-probability: 1 if decoding is greedy or absent.

    A greedy decoder has no distribution to score; the model's own is the only one left.
    """
    return (sampling.temperature if sampling else 0.0) or 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRule:
    """The conditions that end a row."""

    token_ids: torch.Tensor
    """`[n]` int64, on the device: the model's end tokens and the configured ones."""
    strings: list[tuple[str, ...]]
    """The stop strings of each row."""
    max_lengths: torch.Tensor
    """`[rows]` int64: maximum length in tokens, including the prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completions:
    """The generated tokens of each row; values beyond its length are undefined."""

    tokens: torch.Tensor
    """`[rows, steps]` int64."""
    logprobs: torch.Tensor
    """`[rows, steps]` float32."""
    lengths: torch.Tensor
    """`[rows]` int64, including the token that ended the row."""


def generate(
    open_decoder: Callable[[BatchedDataDict], Decoder],
    data: BatchedDataDict,
    *,
    sampling: SamplingConfig,
    greedy: bool,
    tokenizer: PreTrainedTokenizerBase,
    end_token_ids: Sequence[int],
    num_token_ids: int | None,
    generator: torch.Generator,
    max_total_length: int,
    device: torch.device,
) -> BatchedDataDict:
    """Return a `GenerationOutputSpec` for the rows of `data`, on the CPU.

    Args:
        open_decoder: Maps some rows of `data` to a decoder with an empty cache. Ranks of one
            data-parallel rank pass the same rows and sample the same tokens.
        data: See `GenerationDatumSpec`.
        sampling: Temperature, truncation, stop conditions, rows per forward pass.
        greedy: Take the most likely token regardless of `sampling`.
        tokenizer: For the padding token, and to decode for stop strings.
        end_token_ids: The model's end tokens, see `rl_interfaces.backend.end_tokens`.
        num_token_ids: Only ids below this are sampled. None: all that the model has.
        generator: The random generator, on `device`.
        max_total_length: Maximum tokens per row, including the prompt.
        device: The model's device.
    """
    input_ids, lengths = data["input_ids"], data["input_lengths"]
    num_rows = input_ids.shape[0]
    extra_stops = data.get("stop_strings") or [None] * num_rows
    parts: list[BatchedDataDict] = []
    pad_id = resolve_pad_id(sampling, tokenizer)
    for start in range(0, num_rows, sampling.batch_size):
        rows = slice(start, min(start + sampling.batch_size, num_rows))
        prompts = input_ids[rows].to(device)
        prompt_lengths = lengths[rows].to(device)
        stop = StopRule(
            token_ids=_stop_token_ids(sampling, end_token_ids, device=device),
            strings=[(*sampling.stop_strings, *(texts or ())) for texts in extra_stops[rows]],
            max_lengths=(prompt_lengths + sampling.max_new_tokens).clamp(max=max_total_length),
        )
        completions = _complete(
            open_decoder(data.slice(rows.start, rows.stop)),
            prompts,
            prompt_lengths,
            stop=stop,
            sampling=sampling,
            temperature=0.0 if greedy else sampling.temperature,
            tokenizer=tokenizer,
            num_token_ids=num_token_ids,
            generator=generator,
        )
        parts.append(assemble(prompts, prompt_lengths, completions, pad_id=pad_id))
    if not parts:
        return _empty_output(input_ids)
    padding = {"output_ids": pad_id}
    return BatchedDataDict.from_batches(parts, pad_value_dict=padding)


def check_room(data: BatchedDataDict, *, longest: int, limit: str) -> None:
    """Raise if the longest prompt leaves no room for a token.

    Args:
        data: `input_lengths` `[batch]`.
        longest: Maximum tokens of a row, prompt and completion.
        limit: What sets it, for the message.

    Raises:
        ValueError: Names the row, its length and `limit`.
    """
    lengths: list[int] = data["input_lengths"].tolist()
    row = max(range(len(lengths)), key=lengths.__getitem__, default=None)
    if row is not None and lengths[row] >= longest:
        raise ValueError(
            f"'input_lengths'[{row}]={lengths[row]} leaves no room for a token in {limit}"
        )


def resolve_pad_id(sampling: SamplingConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the configured padding token, else the tokenizer's, else its end token.

    Raises:
        ValueError: None of the three is set.
    """
    for candidate in (sampling.pad_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id):
        token_id = special_token_id(candidate)
        if token_id is not None:
            return token_id
    raise ValueError(
        "policy.generation.pad_token_id is not set, and the tokenizer has neither a padding nor "
        "an end token"
    )


def assemble(
    prompts: torch.Tensor, prompt_lengths: torch.Tensor, completions: Completions, *, pad_id: int
) -> BatchedDataDict:
    """Return a `GenerationOutputSpec`: each row is prompt, completion, padding.

    Args:
        prompts: `[rows, seq]` int64, right-padded.
        prompt_lengths: `[rows]` int64.
        completions: The generated tokens.
        pad_id: Padding of `output_ids`.
    """
    total = prompt_lengths + completions.lengths
    width = int(total.max())
    position = torch.arange(width, device=prompts.device)[None, :]
    is_prompt = position < prompt_lengths[:, None]
    is_completion = ~is_prompt & (position < total[:, None])
    from_prompt = position.clamp(max=prompts.shape[1] - 1).expand(len(prompts), -1)
    last_step = completions.tokens.shape[1] - 1
    step = (position - prompt_lengths[:, None]).clamp(min=0, max=last_step)
    # Clamped indices gather arbitrary values outside of their range, which `where` drops.
    output_ids = torch.where(is_prompt, prompts.gather(1, from_prompt), pad_id)
    output_ids = torch.where(is_completion, completions.tokens.gather(1, step), output_ids)
    logprobs = torch.where(is_completion, completions.logprobs.gather(1, step), 0.0)
    return BatchedDataDict(
        {
            "output_ids": output_ids.cpu(),
            "generation_lengths": completions.lengths.cpu(),
            "unpadded_sequence_lengths": total.cpu(),
            "logprobs": logprobs.cpu(),
        }
    )


def _complete(
    decoder: Decoder,
    prompts: torch.Tensor,
    prompt_lengths: torch.Tensor,
    *,
    stop: StopRule,
    sampling: SamplingConfig,
    temperature: float,
    tokenizer: PreTrainedTokenizerBase,
    num_token_ids: int | None,
    generator: torch.Generator,
) -> Completions:
    lengths = torch.zeros_like(prompt_lengths)
    running = prompt_lengths < stop.max_lengths
    # The rows that the decoder has: those that run, and a few that have ended. None: all.
    kept: torch.Tensor | None = None
    num_kept = len(prompts)
    columns: list[torch.Tensor] = []
    logprob_columns: list[torch.Tensor] = []
    # One synchronisation with the device per token, so that the loop ends with the last row.
    while num_running := int(running.sum()):
        if not columns:
            logits = decoder.prefill(prompts, prompt_lengths)
        else:
            if num_running <= _MOST_KEPT * num_kept:
                rows = (running if kept is None else running[kept]).nonzero()[:, 0]
                decoder.keep(rows)
                kept = rows if kept is None else kept[rows]
                num_kept = len(kept)
            logits = decoder.step(columns[-1] if kept is None else columns[-1][kept])
        sampled, logprobs = sample_tokens(
            logits[:, :num_token_ids],
            temperature=temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            generator=generator,
        )
        columns.append(_spread(sampled, kept, num_rows=len(prompts)))
        logprob_columns.append(_spread(logprobs, kept, num_rows=len(prompts)))
        # The lengths of rows that have ended no longer grow, while the decoder has them.
        lengths += running
        ended = torch.isin(columns[-1], stop.token_ids) | (
            prompt_lengths + lengths >= stop.max_lengths
        )
        ended |= _ends_in_string(columns, stop.strings, tokenizer, running=running)
        running &= ~ended
    return Completions(
        tokens=torch.stack(columns, dim=1),
        logprobs=torch.stack(logprob_columns, dim=1),
        lengths=lengths,
    )


def _spread(values: torch.Tensor, rows: torch.Tensor | None, *, num_rows: int) -> torch.Tensor:
    """Return values at their rows, `[num_rows]`, and 0 elsewhere; None: they are of all rows."""
    return values if rows is None else values.new_zeros(num_rows).index_copy(0, rows, values)


def _ends_in_string(
    columns: list[torch.Tensor],
    strings: list[tuple[str, ...]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    running: torch.Tensor,
) -> torch.Tensor:
    """Return which running rows' completions end in one of their stop strings, `[rows]` bool.

    Called after every token, so that a stop string can only be at the end: as many tokens are
    decoded as it may span, whatever the length of the completion.

    Args:
        columns: The tokens of each step so far, `[rows]` int64 each.
        strings: The stop strings of each row.
        tokenizer: Decodes the tokens.
        running: `[rows]` bool: the rows that had not ended before the last token.
    """
    found = torch.zeros_like(running)
    if not any(strings):
        return found
    rows = [row for row, is_running in enumerate(running.tolist()) if is_running and strings[row]]
    if not rows:
        return found
    # A token has a byte at least, and the first ones may be the rest of a character. Tokens that
    # decode to nothing leave too short a text, and the window grows.
    longest = max(len(stop) for row in rows for stop in strings[row])
    window = 8 + max(len(stop.encode()) for row in rows for stop in strings[row])
    while rows:
        recent = torch.stack(columns[-window:], dim=1)[rows].tolist()
        texts = tokenizer.batch_decode(recent, skip_special_tokens=False)
        is_all = window >= len(columns)
        unsure: list[int] = []
        for row, text in zip(rows, texts, strict=True):
            if any(stop in text for stop in strings[row]):
                # The window's first token may decode otherwise than after the tokens before it.
                found[row] = is_all or _contains(columns, row, strings[row], tokenizer)
            elif not is_all and len(text) < longest + 8:
                unsure.append(row)
        rows, window = unsure, 4 * window
    return found


def _contains(
    columns: list[torch.Tensor],
    row: int,
    strings: tuple[str, ...],
    tokenizer: PreTrainedTokenizerBase,
) -> bool:
    tokens = torch.stack([column[row] for column in columns]).tolist()
    text = tokenizer.batch_decode([tokens], skip_special_tokens=False)[0]
    return any(stop in text for stop in strings)


def _stop_token_ids(
    sampling: SamplingConfig, end_token_ids: Sequence[int], *, device: torch.device
) -> torch.Tensor:
    ids = {*sampling.stop_token_ids, *(end_token_ids if sampling.stops_at_end else ())}
    return torch.tensor(sorted(ids), dtype=torch.int64, device=device)


def special_token_id(value: object) -> int | None:
    """Return a `pad_token_id` or `eos_token_id`, which transformers types as more than an int."""
    return value if isinstance(value, int) else None


def _empty_output(input_ids: torch.Tensor) -> BatchedDataDict:
    none = torch.zeros(0, dtype=torch.int64)
    return BatchedDataDict(
        {
            "output_ids": input_ids.new_zeros((0, input_ids.shape[1])),
            "generation_lengths": none,
            "unpadded_sequence_lengths": none.clone(),
            "logprobs": torch.zeros((0, input_ids.shape[1])),
        }
    )


def truncate_logits(logits: torch.Tensor, *, top_k: int | None, top_p: float) -> torch.Tensor:
    """Return `logits` with -inf outside the top k and then outside the nucleus.

    The nucleus is the smallest set of tokens whose probability reaches `top_p` (Holtzman et al.
    2020, "The Curious Case of Neural Text Degeneration"); the most likely token is always in it.

    Args:
        logits: `[rows, vocab]` float32, temperature applied.
        top_k: Tokens kept per row; ties with the last one are kept too. None keeps all.
        top_p: Probability to reach, in (0, 1]. 1.0 keeps all.
    """
    if top_k is not None and top_k < logits.shape[-1]:
        threshold = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    if top_p < 1.0:
        descending, order = logits.sort(dim=-1, descending=True)
        probabilities = descending.softmax(dim=-1)
        # The mass of all more likely tokens: 0 for the first, which is therefore always kept.
        before = probabilities.cumsum(dim=-1) - probabilities
        outside = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= top_p)
        logits = logits.masked_fill(outside, float("-inf"))
    return logits


def sample_tokens(
    logits: torch.Tensor,
    *,
    temperature: float,
    top_k: int | None,
    top_p: float,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a token per row, int64 `[rows]`, and its log-probability, float32 `[rows]`.

    Args:
        logits: `[rows, vocab]`, any float.
        temperature: Divides the logits. 0 takes the most likely token; its log-probability is
            that of the full distribution at temperature 1.
        top_k: See `truncate_logits`.
        top_p: See `truncate_logits`.
        generator: The random generator, on the logits' device.
    """
    # bfloat16 has 8 significant bits, too few for log-probabilities over a vocabulary.
    logits = logits.float()
    if temperature == 0:
        logprobs = logits.log_softmax(dim=-1)
        tokens = logits.argmax(dim=-1)
    else:
        logits = truncate_logits(logits / temperature, top_k=top_k, top_p=top_p)
        logprobs = logits.log_softmax(dim=-1)
        tokens = _draw(logprobs.exp(), generator)
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)


def _draw(probabilities: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return an index per row, int64 `[rows]`, by the inverse of the cumulative distribution.

    It takes one random number per row, where `torch.multinomial` takes one per probability. The
    sums are float64: in float32 they would swallow the rare tokens of a large vocabulary.

    Args:
        probabilities: `[rows, vocab]` float32, each row of sum 1 up to rounding.
        generator: The random generator, on their device.
    """
    sums = probabilities.cumsum(dim=-1, dtype=torch.float64)
    total = sums[:, -1:]
    uniform = torch.rand(total.shape, generator=generator, dtype=total.dtype, device=total.device)
    # Below the total, so that a first sum above it exists, and is that of a possible token.
    target = torch.minimum(uniform * total, total.nextafter(torch.zeros_like(total)))
    return torch.searchsorted(sums, target, right=True).squeeze(-1)
