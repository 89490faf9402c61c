"""A generation backend over a table of bigrams: small, right, and broken rule by rule."""

import torch
from rl_interfaces import (
    NOT_SAMPLED,
    FinishedSubmission,
    GenerationInterface,
    StreamFullError,
)
from rl_interfaces.testing.generation import (
    DecodesText,
    GenerationCase,
    ReceivesWeights,
    RefitsMeanwhile,
)

VOCABULARY, PAD, END, MAX_LENGTH = 24, 0, 1, 16
DEFAULTS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": None,
    "stop_token_ids": None,
    "stop_strings": None,
}


class StateError(RuntimeError):
    """The engine sleeps, or its weights are not whole."""


def decode(tokens):
    return "".join(chr(ord("a") + token) for token in tokens)


def make_table(seed):
    table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2
    table[:, END] -= 20  # rows end by their stops, and seldom by themselves
    return table


class BigramEngine:
    """The weights and their state, which several backends may share."""

    def __init__(self, table):
        self.table = table
        self.version = -1
        self.incoming = None
        self.arrived = None
        self.awake = True
        self.lost = False
        self.generator = torch.Generator().manual_seed(0)


class Bigrams(GenerationInterface):
    """Samples the next token from the row of the last one."""

    contract_version = (1, 0)

    def __init__(self, engine, sampling):
        self.engine = engine
        self.sampling = DEFAULTS | sampling

    def generate(self, data, greedy=False):
        self.require_ready()
        self.check(data)
        greedy = greedy or self.sampling["temperature"] == 0
        stops = data.get("stop_strings") or [None] * len(data["input_ids"])
        rows = zip(data["input_ids"], data["input_lengths"], stops, strict=True)
        prompts = [(ids[:length].tolist(), texts) for ids, length, texts in rows]
        return self.assemble([(p, *self.complete(p, texts, greedy)) for p, texts in prompts])

    def require_ready(self):
        engine = self.engine
        if not engine.awake:
            raise StateError("it sleeps: call prepare_for_generation() first")
        if engine.lost or engine.incoming is not None:
            raise StateError("the weights are not whole")

    def check(self, data):
        if "input_lengths" not in data:
            raise ValueError("'input_lengths' is missing")
        if not len(data["input_ids"]):
            raise ValueError("'input_ids' has no rows")
        width = data["input_ids"].shape[1]
        for row, length in enumerate(data["input_lengths"].tolist()):
            if length > width:
                raise ValueError(f"'input_lengths'[{row}]={length} is more than the width {width}")
            if length >= MAX_LENGTH:
                raise ValueError(f"'input_lengths'[{row}]={length} has no room in {MAX_LENGTH}")

    def complete(self, prompt, texts, greedy):
        completion = [], [], []
        self.extend(completion, prompt, texts, greedy)
        return completion

    def extend(self, completion, prompt, texts, greedy, most=MAX_LENGTH):
        """Append up to so many tokens; return whether the row has ended."""
        tokens, logprobs, versions = completion
        room = min(self.sampling["max_new_tokens"], MAX_LENGTH - len(prompt))
        stops = [*(self.sampling["stop_strings"] or ()), *(texts or ())]
        end = min(room, len(tokens) + most)
        while len(tokens) < end:
            row = self.engine.table[[*prompt, *tokens][-1]].double()
            chances = self.whole(row) if greedy else self.distribution(row)
            if greedy:
                token = int(chances.argmax())
            else:
                token = int(torch.multinomial(chances, 1, generator=self.engine.generator))
            tokens.append(token)
            logprobs.append(float(self.logprob(row, chances, token)))
            versions.append(self.engine.version)
            if self.ends(tokens, stops):
                return True
        return len(tokens) == room

    def ends(self, tokens, stops):
        if tokens[-1] in (END, *(self.sampling["stop_token_ids"] or ())):
            return True
        return any(text in decode(tokens) for text in stops)

    def whole(self, row):
        return row.softmax(-1)

    def distribution(self, row):
        row = row / self.sampling["temperature"]
        if self.sampling["top_k"] is not None:
            row = row.masked_fill(row < row.topk(self.sampling["top_k"]).values[-1], -torch.inf)
        chances, order = row.softmax(-1).sort(descending=True)
        chances[chances.cumsum(-1) - chances >= self.sampling["top_p"]] = 0
        return torch.zeros_like(chances).scatter(0, order, chances / chances.sum())

    def logprob(self, row, chances, token):
        return chances[token].log()

    def assemble(self, rows):
        width = max(len(prompt) + len(tokens) for prompt, tokens, *_ in rows)
        output_ids = torch.full((len(rows), width), PAD)
        logprobs = torch.zeros(len(rows), width)
        weight_versions = torch.full((len(rows), width), NOT_SAMPLED)
        for row, (prompt, tokens, scores, versions) in enumerate(rows):
            end = len(prompt) + len(tokens)
            output_ids[row, :end] = torch.tensor(prompt + tokens)
            logprobs[row, len(prompt) : end] = torch.tensor(scores)
            weight_versions[row, len(prompt) : end] = torch.tensor(versions)
        return {
            "output_ids": output_ids,
            "generation_lengths": torch.tensor([len(tokens) for _, tokens, *_ in rows]),
            "unpadded_sequence_lengths": torch.tensor([len(p) + len(t) for p, t, *_ in rows]),
            "logprobs": logprobs,
            "weight_version": torch.tensor([min(versions) for *_, versions in rows]),
            "weight_versions": weight_versions,
        }

    def prepare_for_generation(self, *args, **kwargs):
        self.engine.awake = True
        return True

    def finish_generation(self, *args, **kwargs):
        self.engine.awake = False
        return True

    def begin_update(self, version):
        if version <= self.engine.version:
            raise ValueError(f"version={version} is not newer than {self.engine.version}")
        self.engine.incoming, self.engine.arrived = version, None

    def update(self, table):
        self.engine.arrived = table

    def fail(self):
        self.engine.lost, self.engine.incoming = True, None

    def commit_update(self, version):
        engine = self.engine
        if engine.incoming != version or engine.arrived is None:
            raise StateError(f"version {version} has not arrived")
        engine.table, engine.version = engine.arrived.clone(), version
        engine.incoming, engine.arrived, engine.lost = None, None, False


class Streaming(Bigrams):
    """Samples two tokens when something is submitted, and the others when it is collected."""

    LIMIT = 200

    def __init__(self, engine, sampling):
        super().__init__(engine, sampling)
        self.next_ticket = 0
        self.running = {}
        self.finished = {}

    @property
    def room(self):
        rows = sum(len(rows) for rows in self.running.values())
        return self.LIMIT - rows - sum(len(rows) for rows in self.finished.values())

    def submit(self, data, greedy=False):
        self.require_ready()
        self.check(data)
        num_rows = len(data["input_ids"])
        if num_rows > self.LIMIT:
            raise ValueError(f"{num_rows} rows are more than {self.LIMIT}")
        if num_rows > self.room:
            raise StreamFullError(f"{num_rows} rows do not fit in {self.room}")
        ticket, self.next_ticket = self.next_ticket, self.next_ticket + 1
        rows = []
        for ids, length in zip(data["input_ids"], data["input_lengths"], strict=True):
            prompt, completion = ids[:length].tolist(), ([], [], [])
            has_ended = self.extend(completion, prompt, None, greedy, most=2)
            rows.append((prompt, completion, greedy, has_ended))
        self.running[ticket] = rows
        return ticket

    def collect(self, tickets=None, *, timeout_s):
        known = self.running.keys() | self.finished.keys()
        wanted = set(known if tickets is None else tickets)
        self.require_known(wanted, known)
        for ticket in [*self.running]:
            self.finish(ticket)
        return [self.hand_out(ticket) for ticket in self.due(wanted)]

    def due(self, wanted):
        return sorted(wanted & self.finished.keys())

    def hand_out(self, ticket):
        rows = self.finished.pop(ticket)
        limit = self.sampling["max_new_tokens"]
        reasons = ("length" if self.is_cut(row[1], limit) else "stop" for row in rows)
        return FinishedSubmission(
            ticket=ticket, output=self.assemble(rows), finish_reasons=tuple(reasons)
        )

    def is_cut(self, tokens, limit):
        return len(tokens) == limit and not self.ends(tokens, ())

    def finish(self, ticket):
        rows = []
        for prompt, completion, greedy, has_ended in self.running.pop(ticket):
            if not has_ended:
                self.go_on(completion, prompt, greedy)
            rows.append((prompt, *completion))
        self.finished[ticket] = rows

    def go_on(self, completion, prompt, greedy):
        self.extend(completion, prompt, None, greedy)

    def cancel(self, tickets):
        self.require_known(set(tickets), self.running.keys() | self.finished.keys())
        for ticket in tickets:
            self.running.pop(ticket, None)
            self.finished.pop(ticket, None)

    def require_known(self, wanted, known):
        if unknown := sorted(wanted - known):
            raise ValueError(f"tickets {unknown} are unknown")


class PlainBigrams(GenerationCase):
    """Without stop strings, sleep and refits."""

    vocab_size, pad_token_id, end_token_id, max_length = VOCABULARY, PAD, END, MAX_LENGTH
    tolerance = 1e-5
    num_samples = 400

    def __init__(self, backend_class=Bigrams):
        self.backend_class = backend_class
        self.table = make_table(seed=0)
        self.engine = BigramEngine(self.table.clone())

    def backend(self, **sampling):
        return self.backend_class(self.engine, sampling)

    def logits(self, tokens):
        return self.table[tokens]


class WholeBigrams(PlainBigrams, DecodesText, ReceivesWeights):
    """With everything."""

    state_error = StateError

    def decode(self, tokens):
        return decode(tokens)

    def change_weights(self):
        self.table = make_table(seed=self.engine.version + 100)

    def refit(self, backend, version):
        backend.begin_update(version)
        backend.update(self.table)
        backend.commit_update(version)

    def fail_refit(self, backend, version):
        backend.begin_update(version)
        backend.fail()


class StreamingBigrams(WholeBigrams, RefitsMeanwhile):
    """With submissions, too."""

    def __init__(self, backend_class=Streaming):
        super().__init__(backend_class)

    def stream(self, backend):
        return backend

    def refit_meanwhile(self, backend, version):
        self.refit(backend, version)
