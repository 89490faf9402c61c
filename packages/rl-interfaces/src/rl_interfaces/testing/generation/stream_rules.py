"""Rules on a backend that samples without being waited for: submissions, cancelling, versions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch

from rl_interfaces.streaming import NOT_SAMPLED, StreamFullError, TicketsLostError
from rl_interfaces.testing.generation import ReceivesWeights, RefitsMeanwhile, Streams
from rl_interfaces.testing.generation.oracle import (
    NUM_NEW,
    Columns,
    batch_of,
    complete,
    completions_of,
    distribution,
    error_of,
    greedy_completion,
    largest_error,
    prompts,
)

if TYPE_CHECKING:
    from rl_interfaces.streaming import FinishedSubmission
    from rl_interfaces.testing.generation import GenerationCase

MOST_ROWS = 100
"""Rows in flight during a refit, so that some are sampled by the weights before and after it."""
_SPARE = 8
"""Tokens of a row that are not sampled in a refit: its prompt, and some room."""
_UNKNOWN = 10**6


def a_submission_gets_what_generate_returns(case: GenerationCase) -> None:
    """The same tokens if greedy, and log-probabilities of the configured distribution if not."""
    rows = prompts(case)
    expected = completions_of(complete(case, rows, greedy=True))
    with _open(case, temperature=0.7) as stream:
        greedy, sampled = stream.submit(rows, greedy=True), stream.submit(rows)
        outputs = {each.ticket: each.output for each in stream.collect_all([greedy, sampled])}
    found = completions_of(outputs[greedy])
    assert found == expected, f"a greedy submission got {found}, and generate {expected}"
    for ticket, sampling in ((greedy, {}), (sampled, {"temperature": 0.7})):
        error = largest_error(case, outputs[ticket], **sampling)
        assert error <= case.tolerance, f"{sampling}: log-probabilities are off by {error:.2g}"


def every_submission_samples_anew(case: GenerationCase) -> None:
    """Two with the same prompts have different samples."""
    rows = [max(prompts(case), key=len)] * 8
    with _open(case) as stream:
        tickets = [stream.submit(rows), stream.submit(rows)]
        first, second = (each.output for each in stream.collect_all(tickets))
    assert completions_of(first) != completions_of(second), "the second repeats the first"


def finish_reasons_say_what_has_ended_a_row(case: GenerationCase) -> None:
    """`stop` for a stop token, `length` for the limit of tokens, for each row."""
    rows = prompts(case)
    free = completions_of(complete(case, rows, greedy=True))
    stop = max(free, key=len)[2]
    with _open(case, stop_token_ids=[stop]) as stream:
        (finished,) = stream.collect_all([stream.submit(rows, greedy=True)])
    ends = [row[-1] for row in completions_of(finished.output)]
    expected = ["stop" if end in (stop, case.end_token_id) else "length" for end in ends]
    found = [*finished.finish_reasons]
    assert found == expected, f"rows that end with {ends} have the reasons {found}"
    assert "stop" in found, f"no row has the stop token {stop}: the check proves nothing"


def submissions_are_collected_once_each(case: GenerationCase) -> None:
    """In whatever order they finish, each with the rows that were submitted."""
    rows = prompts(case)
    batches = [rows[:1], rows[1:3], rows[3:], rows[::-1]]
    with _open(case) as stream:
        tickets = [stream.submit(batch) for batch in batches]
        assert len(set(tickets)) == len(tickets), f"submissions share tickets: {tickets}"
        found = {each.ticket: each.output for each in stream.collect_all(tickets)}
        again = stream.raw.collect(timeout_s=0)
        assert not again, f"{[each.ticket for each in again]} were collected before"
        error = error_of(lambda: stream.raw.collect(tickets[:1], timeout_s=0))
    assert isinstance(error, ValueError), f"a collected ticket ended with {error!r}"
    for ticket, batch in zip(tickets, batches, strict=True):
        output = found[ticket]
        ids = output["output_ids"].tolist()
        begins = [ids[index][: len(row)] for index, row in enumerate(batch)]
        assert begins == batch, f"the submission {ticket} has other rows than were submitted"


def only_the_named_submissions_are_collected(case: GenerationCase) -> None:
    """The others can be collected later."""
    rows = prompts(case)
    with _open(case, max_new_tokens=1) as stream:
        first, second = stream.submit(rows), stream.submit(rows)
        stream.collect_all([second])
        stream.collect_all([first])


def room_is_what_may_be_submitted(case: GenerationCase) -> None:
    """What is submitted and not collected takes it; more rows than there is room are refused."""
    rows = prompts(case)
    with _open(case) as stream:
        limit = stream.raw.room
        assert limit >= len(rows), f"there is room for {limit} rows"
        beyond = error_of(lambda: stream.submit([rows[0]] * (limit + 1)))
        ticket = stream.submit(rows)
        left = stream.raw.room
        full = error_of(lambda: stream.submit([rows[0]] * (left + 1)))
        unchanged = stream.raw.room
        stream.collect_all([ticket])
        after = stream.raw.room
    assert left == limit - len(rows), f"{len(rows)} rows of {limit} leave room for {left}"
    assert isinstance(beyond, ValueError), f"{limit + 1} rows of {limit} ended with {beyond!r}"
    assert isinstance(full, StreamFullError), f"{left + 1} rows of {left} ended with {full!r}"
    assert unchanged == left, f"what was refused takes room: {unchanged} of {left}"
    assert after == limit, f"room for {after} rows after the collection, not {limit}"


def a_refused_submission_costs_no_other(case: GenerationCase) -> None:
    """It is refused at once, or its ticket is named as lost; the others can be collected."""
    rows = prompts(case)
    full = prompts(case, (case.max_length,))
    with _open(case) as stream:
        before = stream.submit(rows)
        refused: list[int] = []
        error = error_of(lambda: refused.append(stream.submit(full)))
        after = stream.submit(rows)
        if not refused:
            assert isinstance(error, ValueError), f"a full prompt ended with {error!r}"
        stream.collect_all([before, after, *refused], lost=refused)


def an_unknown_ticket_is_refused_and_changes_nothing(case: GenerationCase) -> None:
    """By `collect` and `cancel`, which name it; a known one beside it stays."""
    with _open(case) as stream:
        ticket = stream.submit(prompts(case))
        tickets = [ticket, _UNKNOWN]
        for name, call in (
            ("collect", lambda: stream.raw.collect(tickets, timeout_s=stream.timeout_s)),
            ("cancel", lambda: stream.raw.cancel(tickets)),
        ):
            error = error_of(call)
            assert isinstance(error, ValueError), f"{name} of an unknown ticket: {error!r}"
            assert str(_UNKNOWN) in str(error), f"{name} does not name the ticket: {error}"
        stream.collect_all([ticket])


def a_cancelled_submission_is_gone_and_its_room_is_free(case: GenerationCase) -> None:
    """It is not collected; to name it is an error."""
    rows = prompts(case)
    with _open(case) as stream:
        limit = stream.raw.room
        cancelled, kept = stream.submit(rows), stream.submit(rows)
        stream.raw.cancel([cancelled])
        room = stream.raw.room
        stream.collect_all([kept])
        found = stream.raw.collect(timeout_s=0)
        errors = [
            error_of(lambda: stream.raw.collect([cancelled], timeout_s=0)),
            error_of(lambda: stream.raw.cancel([cancelled])),
        ]
    assert not found, "what was cancelled is collected"
    assert room == limit - len(rows), f"room for {room} rows of {limit} beside {len(rows)}"
    for error in errors:
        assert isinstance(error, ValueError), f"a cancelled ticket ended with {error!r}"


def what_has_finished_can_be_cancelled(case: GenerationCase) -> None:
    """It takes room until then, and is not collected after it."""
    rows = prompts(case)
    with _open(case, max_new_tokens=1) as stream:
        limit = stream.raw.room
        finished, later = stream.submit(rows), stream.submit(rows)
        stream.collect_all([later])
        before = stream.raw.room
        stream.raw.cancel([finished])
        after, found = stream.raw.room, stream.raw.collect(timeout_s=0)
    assert before == limit - len(rows), f"room for {before} of {limit} rows beside {len(rows)}"
    assert after == limit, f"room for {after} of {limit} rows when nothing is in flight"
    assert not found, "what was cancelled is collected"


def a_cancelled_submission_changes_no_other(case: GenerationCase) -> None:
    """Those before and after it get the same greedy tokens as without it."""
    rows = prompts(case)
    expected = completions_of(complete(case, rows, greedy=True))
    with _open(case) as stream:
        tickets = [stream.submit(rows, greedy=True) for _ in range(3)]
        stream.raw.cancel(tickets[1:2])
        for each in stream.collect_all([tickets[0], tickets[2]]):
            found = completions_of(each.output)
            assert found == expected, f"{each.ticket} got {found} beside a cancelled one"


def every_token_has_the_version_that_sampled_it(case: GenerationCase) -> None:
    """`weight_versions` `[batch, seq]` int64, of `generate` and of submissions."""
    rows = prompts(case)
    with _open(case) as stream:
        version = int(stream.backend.generate(batch_of(case, rows[:1]))["weight_version"][0]) + 1
        _weights_of(case).refit(stream.backend, version)
        generated = stream.backend.generate(batch_of(case, rows))
        (finished,) = stream.collect_all([stream.submit(rows)])
    for how, output in (("generate", generated), ("a submission", finished.output)):
        for row, versions in enumerate(_versions_of(output)):
            assert set(versions) == {version}, f"{how}, row {row}: {versions}, not {version}"
        oldest = output["weight_version"].tolist()
        assert oldest == [version] * len(rows), f"{how}: 'weight_version' is {oldest}"


def tokens_before_a_refit_keep_their_version_and_log_probabilities(case: GenerationCase) -> None:
    """What runs goes on with the new weights; each token is of the weights of its version."""
    assert isinstance(case, RefitsMeanwhile)
    rows = prompts(case)
    most = case.max_length - _SPARE
    before = {tuple(row): _greedy_scores(case, row, most) for row in rows}
    with _open(case, max_new_tokens=most) as stream:
        old = int(stream.backend.generate(batch_of(case, rows[:1]))["weight_version"][0])
        count = max(1, min(stream.raw.room, MOST_ROWS) // len(rows))
        tickets = [stream.submit(rows, greedy=True) for _ in range(count)]
        _weights_of(case).change_weights()
        case.refit_meanwhile(stream.backend, old + 1)
        finished = stream.collect_all(tickets)
        (last,) = stream.collect_all([stream.submit(rows, greedy=True)])
    continued: dict[tuple[int, ...], tuple[list[int], list[float]]] = {}
    for each in [*finished, last]:
        for row, versions, tokens, scores in zip(
            rows,
            _versions_of(each.output),
            completions_of(each.output),
            _scores_of(each.output),
            strict=True,
        ):
            num_old = versions.count(old)
            pattern = [old] * num_old + [old + 1] * (len(versions) - num_old)
            assert versions == pattern, f"versions {versions} after a refit from {old}"
            kept = tokens[:num_old]
            prefix = (*row, *kept)
            if prefix not in continued:
                continued[prefix] = _greedy_scores(case, prefix, most - num_old)
            expected = [kept + continued[prefix][0], before[tuple(row)][0][:num_old]]
            assert tokens == expected[0], f"{tokens}, of which {num_old} are of the old weights"
            assert kept == expected[1], f"{kept} of version {old} are not of its weights"
            due = before[tuple(row)][1][:num_old] + continued[prefix][1]
            error = max(abs(one - other) for one, other in zip(scores, due, strict=True))
            assert error <= case.tolerance, (
                f"versions {versions}: log-probabilities are off by {error:.2g}"
            )
    versions = _versions_of(last.output)
    assert {version for row in versions for version in row} == {old + 1}, "what came after it"


class _Opened:
    """A stream whose submissions are cancelled in the end, so that no rule sees another's."""

    def __init__(self, case: GenerationCase, backend: Any) -> None:
        assert isinstance(case, Streams)
        self.case = case
        self.backend = backend
        self.raw = case.stream(backend)
        self.timeout_s = case.collect_timeout_s
        self._tickets: list[int] = []

    def submit(self, rows: Sequence[Sequence[int]], *, greedy: bool = False) -> int:
        batch: Any = batch_of(self.case, rows)
        ticket = self.raw.submit(batch, greedy=greedy)
        self._tickets.append(ticket)
        return ticket

    def collect_all(
        self, tickets: Sequence[int], *, lost: Sequence[int] = ()
    ) -> list[FinishedSubmission]:
        """Return submissions, ascending by ticket, when all have finished or are said to be lost.

        Args:
            tickets: Theirs.
            lost: Of those that have to fail.
        """
        left, finished = set(tickets), list[Any]()
        while left:
            found, ended = self._collect(sorted(left))
            assert ended, f"none of {sorted(left)} has finished in {self.timeout_s:.0f} s"
            assert left.issuperset(ended), f"{ended} were collected, of which {left} are due"
            if not found:
                assert set(ended) <= set(lost), f"{ended} were lost"
            left.difference_update(ended)
            finished.extend(found)
        wrong = {each.ticket for each in finished} & set(lost)
        assert not wrong, f"{wrong} have finished, and had no room for a token"
        return sorted(finished, key=lambda each: each.ticket)

    def _collect(self, tickets: list[int]) -> tuple[list[FinishedSubmission], list[int]]:
        """Return what has finished, and the tickets of that, or of what was lost."""
        try:
            found = self.raw.collect(tickets, timeout_s=self.timeout_s)
        except TicketsLostError as error:
            return [], error.tickets
        except ValueError as error:
            raise AssertionError(f"{tickets} are in flight, and not collected: {error}") from error
        arrived = [each.ticket for each in found]
        assert arrived == sorted(arrived), f"{arrived} are not ascending"
        return found, arrived

    def close(self) -> None:
        for ticket in self._tickets:
            with suppress(ValueError):
                self.raw.cancel([ticket])


@contextmanager
def _open(case: GenerationCase, **sampling: object) -> Iterator[_Opened]:
    opened = _Opened(case, case.backend(**{"max_new_tokens": NUM_NEW, **sampling}))
    try:
        yield opened
    finally:
        opened.close()


def _weights_of(case: GenerationCase) -> ReceivesWeights:
    assert isinstance(case, ReceivesWeights)
    return case


def _versions_of(output: Columns) -> list[list[int]]:
    """Return the version of each generated token; check that no other token has one."""
    assert "weight_versions" in output, "'weight_versions' is missing"
    column = output["weight_versions"]
    assert column.dtype == torch.int64, f"'weight_versions' is {column.dtype}"
    shape = tuple(output["output_ids"].shape)
    assert tuple(column.shape) == shape, f"'weight_versions' is {[*column.shape]}, not {shape}"
    found: list[list[int]] = []
    for row, start, end in _spans(output):
        versions = column[row].tolist()
        others = versions[:start] + versions[end:]
        assert set(others) <= {NOT_SAMPLED}, f"row {row}: {others} at prompt and padding"
        found.append(versions[start:end])
    return found


def _scores_of(output: Columns) -> list[list[float]]:
    return [output["logprobs"][row, start:end].tolist() for row, start, end in _spans(output)]


def _spans(output: Columns) -> Iterable[tuple[int, int, int]]:
    ends, counts = output["unpadded_sequence_lengths"], output["generation_lengths"]
    for row, (end, count) in enumerate(zip(ends.tolist(), counts.tolist(), strict=True)):
        yield row, end - count, end


def _greedy_scores(
    case: GenerationCase, prompt: Sequence[int], num_tokens: int
) -> tuple[list[int], list[float]]:
    """Return the most likely continuation by the plain model, and its log-probabilities."""
    if not num_tokens or prompt[-1] == case.end_token_id:
        return [], []
    tokens = greedy_completion(case, prompt, num_tokens)
    logits = case.logits(torch.tensor([*prompt, *tokens[:-1]]))[len(prompt) - 1 :]
    chosen = distribution(logits).gather(-1, torch.tensor(tokens)[:, None])
    return tokens, chosen[:, 0].log().tolist()
