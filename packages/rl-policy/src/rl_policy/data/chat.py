"""The tokens of prompts, answers and observations, and the text of sampled tokens.

Everything that turns text into tokens goes through `ChatTokenizer`: recipes, evaluation,
environments and the Python trainers.

- A prompt is tokenized as the model's own tooling does it. A conversation goes through the chat
  template, which writes the special tokens; a text gets those that the tokenizer puts in front.
- An answer is tokenized together with its prompt. Its tokens are those after the prompt's:

    prompt            <user>31+31=<end><assistant>
    prompt + answer   <user>31+31=<end><assistant>62<end>
                                                  1 1          targets

- What follows the answer is what the template renders. A text, and a template that is plain text,
  have no end of a turn: their answers get the end token.
- If a token of the whole text covers the end of the prompt ("= " and "4" as "=", " 4"), the prompt
  keeps the tokens that the policy samples from, and the rest of the text is tokenized as a
  continuation, without the space that SentencePiece puts in front of a text.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerBase

from rl_policy.data.chat_template import (
    PROBE,
    TEMPLATE,
    ChatTemplate,
    problem_place,
    prompt_name,
)
from rl_policy.data.datasets import Problem
from rl_policy.data.messages import ASSISTANT, Message, message_text

_LOGGER = logging.getLogger(__name__)

# Stands for a turn of the policy where a template is asked for what follows one.
_TURN = "sampled-turn"
# Texts before a continuation. One of them does not merge with what follows.
_ANCHORS = ("=", "a", "1", "\n", ".", " ")
_CHECKED_TOGETHER = 1024

_Span: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt with its answer.

    Attributes:
        tokens: All tokens.
        prompt_length: The number of tokens before the answer.
        targets: 1 for each token that is trained on, otherwise 0.
    """

    tokens: list[int]
    prompt_length: int
    targets: list[int]


@dataclass(frozen=True, slots=True)
class _Text:
    """The text of a prompt with its answer.

    Attributes:
        whole: The text.
        prompt: Its beginning, which the policy samples from. None: the text starts differently,
            and the template's marks say what is trained on.
        spans: The ranges of characters that are trained on.
        has_specials: Whether the tokenizer's own special tokens are added.
        is_open: Whether nothing follows the answer, not even white space.
    """

    whole: str
    prompt: str | None
    spans: Sequence[_Span]
    has_specials: bool
    is_open: bool = False

    @property
    def cuts(self) -> list[int]:
        """The bounds of the spans within the text, except the end of the prompt."""
        known = (0, len(self.prompt or ""), len(self.whole))
        return sorted({cut for span in self.spans for cut in span}.difference(known))

    @property
    def pieces(self) -> list[str]:
        """What is tokenized: the whole, the prompt, and the text up to each cut."""
        return [self.whole, self.prompt or "", *(self.whole[:cut] for cut in self.cuts)]


class ChatTokenizer:
    """Turns prompts, conversations and answers into tokens, and tokens into text.

    Args:
        tokenizer: The model's.
        use_chat_template: Put each prompt that is a text as a user's message through the template.
        system_prompt: The first message of conversations that have no system message.
        template_arguments: Further variables of the chat template, such as `enable_thinking`.
        stop_token_ids: Tokens that end a completion, in addition to the end token.

    Raises:
        ValueError: The tokenizer has no chat template, or no end token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        use_chat_template: bool = False,
        system_prompt: str | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        if use_chat_template and not getattr(tokenizer, "chat_template", None):
            raise ValueError("data.use_chat_template=True, and the tokenizer has no chat template")
        self.tokenizer = tokenizer
        self._end_id = special_id(tokenizer, "eos_token")
        self._stop_ids = {self._end_id, *stop_token_ids}
        added = tokenizer.added_tokens_decoder.items()
        self._special_ids = self._stop_ids | {id_ for id_, token in added if token.special}
        self._use_chat_template = use_chat_template
        self._system_prompt = system_prompt
        self._template = ChatTemplate(tokenizer, template_arguments)
        self._first_ids, self._last_ids = _added_specials(tokenizer)
        self._has_warned: set[str] = set()

    def is_rendered(self, problem: Problem) -> bool:
        """Return whether the chat template renders a prompt."""
        return self._use_chat_template or bool(problem.messages) or bool(problem.completion)

    def prompt_tokens(self, problems: Sequence[Problem]) -> list[list[int]]:
        """Return the tokens of each prompt, after which a completion starts.

        Raises:
            ValueError: The chat template cannot render a prompt; names file and line.
        """
        self._note_keys(problems)
        rendered = [self.is_rendered(problem) for problem in problems]
        texts = [
            self._prompt_text(problem) if is_rendered else self._plain(problem)
            for problem, is_rendered in zip(problems, rendered, strict=True)
        ]
        return self._encode(texts, [not each for each in rendered])

    def examples(self, problems: Sequence[Problem]) -> list[Example]:
        """Return prompts with their answers and what is trained on.

        Raises:
            ValueError: The template cannot render a conversation, or renders it differently than
                the prompt that the policy samples from; names file and line.
        """
        self._note_keys(problems)
        texts = [
            self._conversation(problem) if self.is_rendered(problem) else self._plain_pair(problem)
            for problem in problems
        ]
        pieces = [text.pieces for text in texts]
        rows = iter(
            self._encode(
                [piece for each in pieces for piece in each],
                [text.has_specials for text, each in zip(texts, pieces, strict=True) for _ in each],
            )
        )
        return [
            self._example(text, [next(rows) for _ in each])
            for text, each in zip(texts, pieces, strict=True)
        ]

    def answer_lengths(self, problems: Sequence[Problem]) -> list[int]:
        """Return the number of tokens of a completion that is the answer, with its end."""
        return [len(row) + 1 for row in self._continuations([each.answer for each in problems])]

    def observation_tokens(
        self,
        observations: Sequence[str | Sequence[Message]],
        *,
        problems: Sequence[Problem],
        last_tokens: Sequence[int],
        role: str,
    ) -> list[list[int]]:
        r"""Return the tokens that are appended to a sampled turn, after which the next one starts.

        In a chat template they are what ends the turn, unless it was sampled, the observation as a
        message, and what starts the next turn; otherwise those of the observation alone.

        Example, in the template of Qwen2, for "higher" after a turn that has sampled its end:
            "\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n"

        Args:
            observations: Texts, or messages if the template renders the prompt.
            problems: The problems from which their episodes started.
            last_tokens: The last sampled token of each.
            role: The role of a text's message.

        Raises:
            ValueError: The chat template does not render an observation, or there are messages and
                it is not used.
        """
        texts = [
            self._observation_text(observation, problem, role=role)
            for observation, problem in zip(observations, problems, strict=True)
        ]
        return [
            self._without_sampled_end(row, last)
            for row, last in zip(self._continuations(texts), last_tokens, strict=True)
        ]

    def _without_sampled_end(self, row: list[int], last: int) -> list[int]:
        """Drop what ends a turn up to the token that was sampled; some turns end with several."""
        ends = [*takewhile(self._special_ids.__contains__, row)]
        return row[ends.index(last) + 1 :] if last in ends else row

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, with special tokens and spaces as they are."""
        return str(
            self.tokenizer.decode(
                [*tokens], skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def check_template(self) -> None:
        """Raise `ValueError` unless the chat template, if it is used, renders prompts."""
        if not self._use_chat_template:
            return
        text = self._prompt_text(Problem(PROBE))
        if PROBE not in text:
            raise ValueError(f"{TEMPLATE} leaves the prompt out: it renders {text[:80]!r}")

    def check_conversations(self, problems: Iterable[Problem], *, has_answers: bool) -> None:
        """Raise `ValueError` unless the chat template renders every conversation.

        Args:
            problems: The rows of the run.
            has_answers: Whether answers are trained on, which have to follow their prompts.
        """
        rendered = filter(self.is_rendered, problems)
        while some := list(islice(rendered, _CHECKED_TOGETHER)):
            self._note_keys(some)
            for problem in some:
                if has_answers:
                    self._conversation(problem)
                else:
                    self._prompt_text(problem)

    def check_turns(self, problems: Sequence[Problem], *, role: str) -> None:
        """Raise `ValueError` unless the chat template, if it is used, renders observations.

        Args:
            problems: The problems of the run, some of which may be conversations.
            role: See `observation_tokens`.
        """
        if not any(map(self.is_rendered, problems)):
            return
        observation = "an observation"
        if observation not in self._after_turn(observation, role=role):
            raise ValueError(
                f"{TEMPLATE} renders no conversation of several turns: it leaves out the message "
                f"of the role {role!r} that follows a turn of the policy"
            )

    # Texts

    def _plain(self, problem: Problem) -> str:
        if self._system_prompt is not None:
            raise ValueError(
                f"{prompt_name(problem)} is a text, and data.system_prompt is a message of a "
                "conversation: set data.use_chat_template=true"
            )
        return problem.prompt

    def _plain_pair(self, problem: Problem) -> _Text:
        prompt = self._plain(problem)
        whole = prompt + problem.answer
        return _Text(whole, prompt, [(len(prompt), len(whole))], has_specials=True, is_open=True)

    def _note_keys(self, problems: Sequence[Problem]) -> None:
        self._template.note_keys(
            [
                (problem, [*self._messages(problem), *problem.completion])
                for problem in problems
                if self.is_rendered(problem)
            ]
        )

    def _messages(self, problem: Problem) -> list[Message]:
        """Return the messages of a prompt."""
        messages = [*problem.messages] or [{"role": "user", "content": problem.prompt}]
        if self._system_prompt is None or messages[0]["role"] in ("system", "developer"):
            return messages
        return [{"role": "system", "content": self._system_prompt}, *messages]

    def _prompt_text(self, problem: Problem) -> str:
        return self._template.render(problem, self._messages(problem), is_prompt=True)

    def _conversation(self, problem: Problem) -> _Text:
        """Return the text of a conversation with its answer."""
        context = self._messages(problem)
        completion = [*problem.completion] or [{"role": ASSISTANT, "content": problem.answer}]
        messages = [*context, *completion]
        whole = self._template.render(problem, messages)
        prompt = self._template.render(problem, context, is_prompt=True)
        is_whole = whole.startswith(prompt)
        if self._template.has_marks(problem):
            if not is_whole and not problem.imitates_turns:
                raise _rewritten(problem, prompt, whole)
            spans = self._template.marked_spans(problem, messages)
            if not problem.imitates_turns:
                start = len(prompt)
                spans = [(max(span[0], start), span[1]) for span in spans if span[1] > start]
            if not spans:
                raise ValueError(
                    f"{prompt_name(problem)}: {TEMPLATE} marks nothing of the answer as generated"
                )
        else:
            if not is_whole:
                raise _rewritten(problem, prompt, whole)
            first = 0 if problem.imitates_turns else len(context)
            starts = {len(context): prompt}
            spans = list(self._turn_spans(problem, messages, whole, first, starts))
            if not spans or spans[-1][1] < len(whole):
                raise ValueError(
                    f"{prompt_name(problem)}: {TEMPLATE} renders the last turn of the assistant "
                    f"not after the prompt {prompt[-80:]!r}, but as {whole[-80:]!r}"
                )
        content = message_text(messages[-1]).rstrip()
        return _Text(
            whole,
            prompt if is_whole else None,
            spans,
            has_specials=False,
            is_open=bool(content) and whole.endswith(content),
        )

    def _turn_spans(
        self,
        problem: Problem,
        messages: Sequence[Message],
        whole: str,
        first: int,
        starts: Mapping[int, str],
    ) -> Iterator[_Span]:
        """Yield the characters of each turn of the assistant, as they follow its own prompt.

        Args:
            problem: Has the tools, and is named in errors.
            messages: The conversation.
            whole: The rendered conversation.
            first: The message from which turns are trained on.
            starts: The renderings of prompts that are known, by their number of messages.
        """
        left_out: list[int] = []
        for index in range(first, len(messages)):
            if messages[index]["role"] != ASSISTANT:
                continue
            is_last = index == len(messages) - 1
            if not index:  # nothing comes before it that it could answer
                left_out.append(index)
                continue
            try:
                start = starts.get(index)
                if start is None:
                    start = self._template.render(problem, messages[:index], is_prompt=True)
                until = whole if is_last else self._template.render(problem, messages[: index + 1])
            except ValueError:  # some templates refuse a part of a conversation
                left_out.append(index)
                continue
            end = len(whole) if is_last else self._end_of_turn(whole, until, messages[index])
            if end is None or not whole.startswith(start) or len(start) >= end:
                left_out.append(index)
            else:
                yield len(start), end
        if left_out:
            self._warn_once(
                "turns",
                f"{TEMPLATE} renders earlier turns of the assistant differently once others "
                f"follow: {problem_place(problem)} is trained on without its messages "
                f"{', '.join(map(str, left_out))}, and so are other conversations",
            )

    def _end_of_turn(self, whole: str, until: str, message: Message) -> int | None:
        """Return where a turn ends in the whole conversation; None if it is rewritten there."""
        if whole.startswith(until):
            return len(until)
        # Some templates end a conversation, not a turn, with the end token.
        shorter = until.removesuffix(str(self.tokenizer.eos_token))
        ends_turn = not shorter.rstrip().endswith(message_text(message).strip())
        return len(shorter) if ends_turn and whole.startswith(shorter) else None

    def _observation_text(
        self, observation: str | Sequence[Message], problem: Problem, *, role: str
    ) -> str:
        if self.is_rendered(problem):
            return self._after_turn(observation, role=role)
        if not isinstance(observation, str):
            raise ValueError(
                f"an environment answers the prompt {problem.prompt[:40]!r}, which is a text, by "
                "messages: let its reset return messages, or set data.use_chat_template"
            )
        return observation

    def _after_turn(self, observation: str | Sequence[Message], *, role: str) -> str:
        """Return what a chat template puts after a turn of the policy that is answered."""
        is_text = isinstance(observation, str)
        answer = [{"role": role, "content": observation}] if is_text else [*observation]
        messages = [
            {"role": "user", "content": PROBE},
            {"role": ASSISTANT, "content": _TURN},
            *answer,
        ]
        text = self._template.render(
            Problem("\n".join(map(message_text, answer))), messages, is_prompt=True
        )
        _, found, rest = text.partition(_TURN)
        if not found:
            raise ValueError(
                f"{TEMPLATE} renders no conversation of several turns: it leaves out messages of "
                f"the role {ASSISTANT!r}"
            )
        return rest

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._has_warned:
            self._has_warned.add(kind)
            _LOGGER.warning("%s", text)

    # Tokens

    def _example(self, text: _Text, rows: Sequence[list[int]]) -> Example:
        """Return the tokens of a text; those of its spans are targets.

        Args:
            text: The text.
            rows: The tokens of its `pieces`.
        """
        whole, prompt, *beginnings = rows
        cuts, start = text.cuts, len(text.prompt or "")
        if whole[: len(prompt)] != prompt:
            assert text.prompt is not None
            self._warn_once(
                "merge",
                f"the tokenizer joins the end of a prompt, {text.prompt[-10:]!r}, with its answer, "
                f"{text.whole[start : start + 10]!r}: the prompt keeps the tokens it has alone",
            )
            ends = [cut for cut in cuts if cut > start]
            rest, *parts = self._continuations([text.whole[start:end] for end in [None, *ends]])
            whole = prompt + rest
            beginnings[len(beginnings) - len(ends) :] = [prompt + part for part in parts]
        bounds = {0: 0, len(text.whole): len(whole), start: len(prompt)}
        for cut, beginning in zip(cuts, beginnings, strict=True):
            # A token across a cut belongs to what follows.
            bounds[cut] = _shared_length(whole, beginning)
        if text.is_open and whole[-1:] != [self._end_id]:
            marks = self._special_ids.difference([self.tokenizer.bos_token_id])
            if text.has_specials or marks.isdisjoint(whole):
                whole = [*whole, self._end_id]
                bounds[len(text.whole)] = len(whole)
            else:
                self._warn_once(
                    "end",
                    f"{TEMPLATE} renders nothing after the answer {text.whole[start:][:40]!r}: the "
                    "model does not learn to end its answers; add what ends a turn to the template",
                )
        targets = [0] * len(whole)
        for first, last in text.spans:
            targets[bounds[first] : bounds[last]] = [1] * (bounds[last] - bounds[first])
        return Example(whole, targets.index(1) if text.prompt is None else len(prompt), targets)

    def _encode(self, texts: Sequence[str], has_specials: Sequence[bool]) -> list[list[int]]:
        """Tokenize texts in two calls, which is many times as fast as one call per text."""
        rows: list[list[int]] = [[]] * len(texts)
        for is_special in (False, True):
            places = [place for place, each in enumerate(has_specials) if each == is_special]
            found = self._call([texts[place] for place in places], is_special=is_special)
            for place, row in zip(places, found, strict=True):
                rows[place] = self._with_specials_once(row) if is_special else row
        return rows

    def _with_specials_once(self, row: list[int]) -> list[int]:
        """Drop what the tokenizer puts after a text, and what the text begins with already."""
        first, last = self._first_ids, self._last_ids
        if last and row[-len(last) :] == last:
            row = row[: -len(last)]
        if first and row[len(first) : 2 * len(first)] == first:
            row = row[len(first) :]
        return row

    def _continuations(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of texts that follow others, without what starts a text."""
        rows: dict[str, list[int]] = {"": []}
        for anchor in _ANCHORS:
            left = [text for text in texts if text not in rows]
            if not left:
                break
            head, *found = self._call([anchor, *(anchor + text for text in left)])
            for text, row in zip(left, found, strict=True):
                if row[: len(head)] == head:
                    rows[text] = row[len(head) :]
        if left := [text for text in texts if text not in rows]:
            raise ValueError(f"the tokenizer joins {left[0][:40]!r} with whatever precedes it")
        return [rows[text] for text in texts]

    def _call(self, texts: Sequence[str], *, is_special: bool = False) -> list[list[int]]:
        if not texts:
            return []
        return self.tokenizer([*texts], add_special_tokens=is_special, return_attention_mask=False)[
            "input_ids"
        ]


def special_id(tokenizer: PreTrainedTokenizerBase, name: str) -> int:
    """Return the id of a special token.

    Args:
        tokenizer: The model's.
        name: `pad_token` or `eos_token`.

    Raises:
        ValueError: The tokenizer has no such token.
    """
    token_id = getattr(tokenizer, f"{name}_id")
    if token_id is None:
        raise ValueError(f"policy.tokenizer: the tokenizer has no {name}")
    return int(token_id)


def _added_specials(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the tokens that a tokenizer puts before and after a text."""
    bare: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    full: list[int] = tokenizer("a")["input_ids"]
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    return [], []


def _shared_length(first: Sequence[object], second: Sequence[object]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _rewritten(problem: Problem, prompt: str, whole: str) -> ValueError:
    """Return the error of a template that renders a prompt differently once it is answered."""
    length = _shared_length(prompt, whole)
    shown = [f"...{each[length - 40 :]}" if length > 60 else each for each in (prompt, whole)]
    return ValueError(
        f"{prompt_name(problem)} is rendered by {TEMPLATE} as {shown[0]!r:.300}, and with its "
        f"answer as {shown[1]!r:.300}, which does not begin with it: the answer would not follow "
        "what the policy samples from. Give the messages their reasoning_content, or set "
        "data.chat_template_kwargs (such as {enable_thinking: false}) or the template"
    )
