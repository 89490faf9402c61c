"""Backends over bigrams, each of which breaks one rule of the conformance kit."""

import torch
from bigram_generation import END, Bigrams, StateError, Streaming
from rl_interfaces import TicketsLostError


class SaysNoVersion(Bigrams):
    contract_version = None


class ReturnsFloat64(Bigrams):
    def assemble(self, rows):
        output = super().assemble(rows)
        return output | {"logprobs": output["logprobs"].double()}


class PadsWithTheEndToken(Bigrams):
    def assemble(self, rows):
        output = super().assemble(rows)
        for row, end in enumerate(output["unpadded_sequence_lengths"]):
            output["output_ids"][row, end:] = END
        return output


class ScoresThePadding(Bigrams):
    def assemble(self, rows):
        output = super().assemble(rows)
        for row, end in enumerate(output["unpadded_sequence_lengths"]):
            output["logprobs"][row, end:] = -1.0
        return output


class SamplesAtTemperatureZero(Bigrams):
    """Takes the second most likely token where 0 is configured."""

    def whole(self, row):
        if self.sampling["temperature"] != 0:
            return super().whole(row)
        return super().whole(row.index_fill(0, row.argmax(), -30.0))


class TempersGreedyLogprobs(Bigrams):
    def logprob(self, row, chances, token):
        if self.sampling["temperature"] == 0.5 and self.sampling["top_k"] == 2:
            return self.distribution(row)[token].clamp(min=1e-9).log()
        return super().logprob(row, chances, token)


class SortsRows(Bigrams):
    """Puts rows with equal lengths of prompts in order of their tokens, the rest by length."""

    def generate(self, data, greedy=False):
        if not greedy or len(data["input_ids"]) != 5 or int(data["input_lengths"][0]) != 4:
            return super().generate(data, greedy)
        order = data["input_lengths"].argsort()
        return super().generate({key: value[order] for key, value in data.items()}, greedy)


class GivesOneTokenMore(Bigrams):
    def complete(self, prompt, texts, greedy):
        kept = self.sampling
        if kept["max_new_tokens"] == 3:
            self.sampling = kept | {"max_new_tokens": 4}
        completion = super().complete(prompt, texts, greedy)
        self.sampling = kept
        return completion


class WritesIntoTheBatch(Bigrams):
    def generate(self, data, greedy=False):
        output = super().generate(data, greedy)
        data["input_ids"][:, -1] = END
        return output


class IgnoresStopTokens(Bigrams):
    def __init__(self, engine, sampling):
        super().__init__(engine, sampling | {"stop_token_ids": None})


class IgnoresStopStrings(Bigrams):
    def __init__(self, engine, sampling):
        super().__init__(engine, sampling | {"stop_strings": None})


class StopsAllRowsAtOnesString(Bigrams):
    def generate(self, data, greedy=False):
        if "stop_strings" in data:
            texts = [text for row in data["stop_strings"] for text in row or ()]
            data = data | {"stop_strings": [texts] * len(data["input_ids"])}
        return super().generate(data, greedy)


class ScoresUntempered(Bigrams):
    """Samples right, and says the model's own probability: what vLLM does unless told."""

    def logprob(self, row, chances, token):
        tempered = self.sampling["temperature"] == 0.7
        return super().logprob(row, self.whole(row) if tempered else chances, token)


class ScoresUntruncated(Bigrams):
    def logprob(self, row, chances, token):
        if self.sampling["temperature"] == 0.8:
            chances = (row / 0.8).softmax(-1)
        return super().logprob(row, chances, token)


class SamplesUntempered(Bigrams):
    """Scores right, and samples from another temperature."""

    def distribution(self, row):
        if self.sampling["temperature"] == 0.6:
            return row.softmax(-1)
        return super().distribution(row)


class SamplesBeyondTheTopK(Bigrams):
    def distribution(self, row):
        if self.sampling["top_k"] == 4:
            row = row.masked_fill(row < row.topk(5).values[-1], -torch.inf)
            return row.softmax(-1)
        return super().distribution(row)


class StopsShortOfTheNucleus(Bigrams):
    """Leaves out the token with which the probability is reached."""

    def distribution(self, row):
        if self.sampling["top_p"] != 0.7:
            return super().distribution(row)
        chances, order = row.softmax(-1).sort(descending=True)
        chances[1:][chances.cumsum(-1)[1:] >= 0.7] = 0
        return torch.zeros_like(chances).scatter(0, order, chances / chances.sum())


class RepeatsItself(Bigrams):
    def generate(self, data, greedy=False):
        self.engine.generator.manual_seed(0)
        return super().generate(data, greedy)


class MissesLengths(Bigrams):
    def check(self, data):
        if "input_lengths" in data:
            super().check(data)
        else:
            raise ValueError("a key is missing")


class CutsLengths(Bigrams):
    def check(self, data):
        if "input_lengths" in data:
            width = data["input_ids"].shape[1]
            data = data | {"input_lengths": data["input_lengths"].clamp(max=width)}
        super().check(data)


class TakesFullPrompts(Bigrams):
    def check(self, data):
        lengths = data.get("input_lengths", [])
        if len(lengths) and int(lengths.max()) <= 16:
            data = data | {"input_lengths": data["input_lengths"].clamp(max=15)}
        super().check(data)


class TakesNoRows(Bigrams):
    def check(self, data):
        if len(data["input_ids"]):
            super().check(data)

    def assemble(self, rows):
        return super().assemble(rows) if rows else {}


class GeneratesAsleep(Bigrams):
    def require_ready(self):
        if self.engine.awake:
            super().require_ready()


class WakesWithOtherWeights(Bigrams):
    def prepare_for_generation(self, *args, **kwargs):
        self.engine.spoilt = not self.engine.awake or hasattr(self.engine, "spoilt")
        return super().prepare_for_generation()

    def whole(self, row):
        return super().whole(row.flip(0) if getattr(self.engine, "spoilt", False) else row)


class ForgetsTheVersion(Bigrams):
    def assemble(self, rows):
        output = super().assemble(rows)
        if len(rows) > 1:
            output["weight_version"][1] = -5
        return output


class KeepsTheOldWeights(Bigrams):
    """Says that it has new ones."""

    def update(self, table):
        super().update(self.engine.table)


class GeneratesInARefit(Bigrams):
    def require_ready(self):
        if self.engine.incoming is None:
            super().require_ready()


class ForgetsAFailure(Bigrams):
    def fail(self):
        self.engine.incoming = None


class TakesStaleVersions(Bigrams):
    def begin_update(self, version):
        self.engine.incoming, self.engine.arrived = version, None


class WakesInSilence(Bigrams):
    """Names no way out."""

    def require_ready(self):
        if not self.engine.awake:
            raise StateError("not now")
        super().require_ready()


class ScoresSubmissionsUntempered(Streaming):
    """Only those that are not greedy: `generate` is right."""

    def go_on(self, completion, prompt, greedy):
        super().go_on(completion, prompt, greedy)
        if self.sampling["temperature"] == 0.7 and not greedy:
            completion[1][-1] -= 0.5


class SubmissionsRepeatThemselves(Streaming):
    def submit(self, data, greedy=False):
        self.engine.generator.manual_seed(0)
        return super().submit(data, greedy)

    def go_on(self, completion, prompt, greedy):
        self.engine.generator.manual_seed(1)
        super().go_on(completion, prompt, greedy)


class AlwaysSaysLength(Streaming):
    def is_cut(self, tokens, limit):
        return True


class HandsOutTwice(Streaming):
    """What is collected with others stays, in a copy."""

    def hand_out(self, ticket):
        rows = self.finished[ticket]
        finished = super().hand_out(ticket)
        if len(rows) == 1:
            self.finished[ticket] = rows
        return finished


class HandsOutEverything(Streaming):
    def due(self, wanted):
        return sorted(self.finished if self.sampling["max_new_tokens"] == 1 else wanted)


class KeepsRoomForWhatItRefuses(Streaming):
    refused = 0

    @property
    def room(self):
        return super().room - self.refused

    def submit(self, data, greedy=False):
        if self.room < len(data["input_ids"]) <= self.LIMIT:
            self.refused = 1
        return super().submit(data, greedy)


class FailsWithARefusedOne(Streaming):
    """A prompt without room takes what was submitted before it along."""

    def submit(self, data, greedy=False):
        try:
            return super().submit(data, greedy)
        except ValueError:
            if len(data["input_ids"]) == 1 and self.running:
                self.lost = sorted(self.running)
                self.running.clear()
            raise

    def collect(self, tickets=None, *, timeout_s):
        if lost := getattr(self, "lost", []):
            self.lost = []
            raise TicketsLostError("gone", tickets=lost)
        return super().collect(tickets, timeout_s=timeout_s)


class CancelsBesideAnUnknownOne(Streaming):
    def cancel(self, tickets):
        for ticket in tickets:
            if ticket in self.running and len(tickets) > 1:
                del self.running[ticket]
        super().cancel(tickets)


class GivesNoRoomBack(Streaming):
    cancelled = 0

    @property
    def room(self):
        return super().room - self.cancelled

    def cancel(self, tickets):
        self.cancelled = sum(len(self.running.get(ticket, ())) for ticket in tickets)
        super().cancel(tickets)


class KeepsWhatHasFinished(Streaming):
    """Cancels what runs alone."""

    def cancel(self, tickets):
        self.require_known(set(tickets), self.running.keys() | self.finished.keys())
        for ticket in tickets:
            self.running.pop(ticket, None)


class CancelsANeighboursTokens(Streaming):
    def cancel(self, tickets):
        super().cancel(tickets)
        for rows in self.running.values():
            for _, completion, greedy, _ in rows:
                if greedy and completion[0]:
                    completion[0][-1] = 2


class ForgetsTheVersionsOfTokens(Streaming):
    """Says the present version of every token, also of the prompt."""

    def assemble(self, rows):
        output = super().assemble(rows)
        output["weight_versions"][:] = output["weight_version"][:, None]
        return output


class SaysTheLastVersion(Streaming):
    """Of a row that a refit has met, all tokens are said to be of the new weights."""

    def assemble(self, rows):
        renewed = [(p, t, s, [max(versions)] * len(versions)) for p, t, s, versions in rows]
        return super().assemble(renewed)


class StartsAgainAfterARefit(Streaming):
    """Samples all tokens anew, and says that the first ones are those of before."""

    def go_on(self, completion, prompt, greedy):
        if completion[2][0] != self.engine.version:
            completion[0][:], completion[1][:] = [], []
            versions = [*completion[2]]
            super().go_on(completion, prompt, greedy)
            completion[2][: len(versions)] = versions
            del completion[2][len(completion[0]) :]
        else:
            super().go_on(completion, prompt, greedy)
