"""The public tinker client against the server, and what it gets against transformers and peft."""

import http.client
import json
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from patience import PATIENCE_S
from rl_policy.data.tiny_model import build_tokenizer
from tinker_server import KEY, LIMITS, MAX_BYTES, MAX_RANK, NAME, build_model, running_server
from tolerances import (
    ELEMENTWISE,
    LOGPROBS,
    REPEATED,
    assert_all_close,
    assert_close,
    expected_of,
    measured_training,
)
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.needs("rl-policy[tinker]")]

tinker = pytest.importorskip("tinker", reason="the client is no dependency of its server")
peft = pytest.importorskip("peft", reason="comes with the extra tinker")
types = tinker.types

ADAM = {"learning_rate": 0.02, "beta1": 0.8, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.1}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_model(tmp_path_factory.mktemp("tinker") / "model")


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    path = tmp_path_factory.mktemp("tinker-state")
    path.chmod(0o700)
    return path


@pytest.fixture(scope="module")
def address(shared_ray, model, state):
    with running_server(model, state) as address:
        yield address


@pytest.fixture
def service(address):
    with tinker.ServiceClient(base_url=address, api_key=KEY) as client:
        yield client


def tokens(text):
    return build_tokenizer().encode(text)


def datum(text, **inputs):
    """Return a datum whose targets are the next tokens, weights 0 on the first and then 1, 2..."""
    ids = tokens(text)
    weights = [float(place) for place in range(len(ids) - 1)]
    values = {"target_tokens": ids[1:], "weights": weights} | inputs
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=values)


def plain(model):
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def plain_logprobs(model, datum):
    """Return the log-probability of each target by plain transformers."""
    ids = torch.tensor([datum.model_input.to_ints()])
    targets = datum.loss_fn_inputs["target_tokens"].to_torch()
    logits = model(input_ids=ids).logits[0]
    return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def with_checkpoint(model, state, path):
    """Return the base model with the adapters of a checkpoint, by plain peft."""
    directory = Path(state) / "checkpoints" / path.removeprefix("tinker://")
    return peft.PeftModel.from_pretrained(plain(model), directory, is_trainable=True)


def train(client, data, *, steps=1, loss="cross_entropy", **adam):
    for _ in range(steps):
        done = client.forward_backward(data, loss)
        step = client.optim_step(types.AdamParams(**ADAM | adam))
        found = done.result(), step.result()
    return found


def test_a_client_learns_what_it_talks_to(address, service, model):
    capabilities = tinker.RestClient(base_url=address, api_key=KEY).get_server_capabilities()
    (served,) = capabilities.result().supported_models
    assert (served.model_name, served.max_context_length) == (NAME, 64)
    client = service.create_lora_training_client(NAME, rank=4).result()
    info = client.get_info()
    assert (info.model_data.model_name, info.lora_rank, info.is_lora) == (NAME, 4, True)
    text = "12+3=?"
    assert client.get_tokenizer().encode(text) == tokens(text)


@pytest.mark.promise
def test_logprobs_and_loss_are_those_of_transformers(service, model):
    client = service.create_lora_training_client(NAME, rank=4, seed=1).result()
    base = plain(model)
    # Targets that are the next tokens, and some that are not.
    for data in (
        [datum("hello"), datum("12+3=15, is it?")],
        [datum("hello"), datum("abc", target_tokens=[0, 7])],
    ):
        for call in (client.forward, client.forward_backward):
            found = call(data, "cross_entropy").result()
            total = 0.0
            for each, output in zip(data, found.loss_fn_outputs, strict=True):
                expected = expected_of(partial(plain_logprobs, datum=each), base, LOGPROBS)
                assert_close(output["logprobs"].to_torch(), expected)
                total -= float(expected.exact @ each.loss_fn_inputs["weights"].to_torch().double())
            assert found.metrics["loss:sum"] == pytest.approx(total, rel=REPEATED)


@pytest.mark.parametrize("clip", [0.0, 0.7])
@pytest.mark.promise
def test_two_steps_are_torchs_adamw_on_the_sum(service, model, state, clip):
    client = service.create_lora_training_client(NAME, rank=3, seed=5).result()
    data = [datum("hello"), datum("1+2=3")]
    start = client.save_state(f"start-{clip}").result().path
    oracle = with_checkpoint(model, state, start)
    trained = [p for p in oracle.parameters() if p.requires_grad]
    assert trained[0].shape[0] == 3
    adamw = partial(
        torch.optim.AdamW, lr=ADAM["learning_rate"], betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1
    )

    def loss_of(model, data):
        weights = torch.cat([each.loss_fn_inputs["weights"].to_torch() for each in data])
        terms = -torch.cat([plain_logprobs(model, each) for each in data]) * weights
        return terms.sum(), terms

    max_norm = clip or float("inf")
    expected = measured_training(oracle, adamw, loss_of, [data] * 2, max_norm=max_norm)
    for number in range(2):
        # Two calls before a step add up.
        for each in data:
            client.forward_backward([each], "cross_entropy").result()
        step = client.optim_step(types.AdamParams(**ADAM, grad_clip_norm=clip)).result()
        assert_close(step.metrics["grad_norm"], expected.norms[number], "grad_norm")
    found = with_checkpoint(model, state, client.save_state(f"end-{clip}").result().path)
    assert_all_close(dict(found.named_parameters()), expected.parameters)


def test_a_custom_loss_steps_as_the_same_loss_of_the_server(service):
    data = [datum("hello"), datum("1+2=3")]

    def weighted(data, logprobs):
        weights = [each.loss_fn_inputs["weights"].to_torch() for each in data]
        return -sum((w * p).sum() for w, p in zip(weights, logprobs, strict=True)), {}

    outputs = []
    for is_custom in (False, True):
        client = service.create_lora_training_client(NAME, rank=4, seed=2).result()
        for _ in range(2):
            if is_custom:
                client.forward_backward_custom(data, weighted).result()
            else:
                client.forward_backward(data, "cross_entropy").result()
            client.optim_step(types.AdamParams(**ADAM)).result()
        found = client.forward(data, "cross_entropy").result()
        outputs.append(torch.cat([each["logprobs"].to_torch() for each in found.loss_fn_outputs]))
    assert torch.equal(*outputs)


def test_tenants_that_alternate_are_as_each_alone(service):
    texts = {1: ["hello", "1+2=3"], 2: ["world!", "4+5"]}

    def losses(client, seed, steps):
        for _ in range(steps):
            yield [train(client, [datum(text)])[0].metrics["loss:sum"] for text in texts[seed]]

    def create(seed):
        return service.create_lora_training_client(NAME, rank=4 * seed, seed=seed).result()

    alone = {seed: list(losses(create(seed), seed, 3)) for seed in texts}
    together = {seed: losses(create(seed), seed, 3) for seed in texts}
    found = {seed: [] for seed in texts}
    for _ in range(3):
        for seed, each in together.items():
            found[seed].append(next(each))
    assert found == alone
    assert alone[1] != alone[2]


def test_samplers_sample_from_the_weights_of_their_moment(service, model, state):
    client = service.create_lora_training_client(NAME, rank=4, seed=3).result()
    prompt = tokens("12+3=")
    train(client, [datum("12+3=15, is it?")], steps=4)
    path = client.save_weights_for_sampler("moment").result().path
    at_once = client.save_weights_and_get_sampling_client().result()
    train(client, [datum("12+3=99999999")], steps=4)
    merged = with_checkpoint(model, state, path).merge_and_unload()
    greedy = types.SamplingParams(max_tokens=8, temperature=0.0)
    for sampler, oracle in (
        (service.create_sampling_client(path).result(), merged),
        (at_once, merged),
        (service.create_sampling_client(base_model=NAME).result(), plain(model)),
    ):
        found = sampler.sample(types.ModelInput.from_ints(prompt), 2, greedy).result()
        expected = list(prompt)
        for _ in range(8):
            logits = oracle(input_ids=torch.tensor([expected])).logits[0, -1]
            expected.append(int(logits.argmax()))
            if expected[-1] == build_tokenizer().eos_token_id:
                break
        for sequence in found.sequences:
            assert sequence.tokens == expected[len(prompt) :]
        logprobs = sampler.compute_logprobs(types.ModelInput.from_ints(expected)).result()
        ids = torch.tensor(expected)

        def own(model, ids=ids):
            logits = model(input_ids=ids[None]).logits[0].log_softmax(-1)
            return logits[:-1].gather(-1, ids[1:, None])[:, 0]

        assert logprobs[0] is None
        plain_ones = expected_of(own, oracle, LOGPROBS)
        assert_close(logprobs[1:], plain_ones)
        last = sampler.compute_logprobs(types.ModelInput.from_ints(expected), 2).result()
        assert last[-2:] == logprobs[-2:]
        assert not any(each is not None for each in last[:-2])
        assert_close(found.sequences[0].logprobs, plain_ones[len(prompt) - 1 :])
    for _ in range(3):
        client.save_weights_and_get_sampling_client().result()
    with pytest.raises(Exception, match=r"no longer held: .* 2 samplers .*tinker\.max_samplers"):
        at_once.sample(types.ModelInput.from_ints(prompt), 1, greedy).result()


def test_sampling_settings(service):
    sampler = service.create_sampling_client(base_model=NAME).result()
    prompt = types.ModelInput.from_ints(tokens("12+3="))

    def sample(num_samples=1, **settings):
        settings = types.SamplingParams(**{"max_tokens": 12} | settings)
        return sampler.sample(prompt, num_samples, settings).result().sequences

    one, two = (sample(3, seed=7) for _ in range(2))
    assert [each.tokens for each in one] == [each.tokens for each in two]
    assert len({tuple(each.tokens) for each in one}) > 1
    assert len({each.sequence_id for each in one}) == 3
    (free,) = sample(temperature=0.0, stop=[])
    assert (len(free.tokens), free.stop_reason) == (12, "length")
    fourth = free.tokens[3]
    (stopped,) = sample(temperature=0.0, stop=[fourth])
    end = free.tokens.index(fourth) + 1
    assert (stopped.tokens, stopped.stop_reason) == (free.tokens[:end], "stop")
    (cut,) = sample(top_k=1)
    (greedy,) = sample(temperature=0.0)
    assert cut.tokens == greedy.tokens
    assert max(map(abs, cut.logprobs)) <= ELEMENTWISE, "of the distribution that was sampled from"


def test_a_checkpoint_continues_bit_for_bit(service, address):
    data = [datum("hello"), datum("1+2=3")]
    client = service.create_lora_training_client(NAME, rank=5, seed=4).result()
    train(client, data, steps=2)
    path = client.save_state("kept", ttl_seconds=3600, user_metadata={"a": "b"}).result().path
    # Gradients that are pending are none of the checkpoint's.
    client.forward_backward(data, "cross_entropy").result()
    expected = [train(client, data)[0].metrics["loss:sum"] for _ in range(3)]
    with tinker.ServiceClient(base_url=address, api_key=KEY) as other:
        resumed = other.create_training_client_from_state_with_optimizer(path).result()
        assert resumed.get_info().lora_rank == 5
        resumed.forward_backward(data, "cross_entropy").result()
        assert [train(resumed, data)[0].metrics["loss:sum"] for _ in range(3)] == expected
        fresh = other.create_training_client_from_state(path).result()
        fresh.forward_backward(data, "cross_entropy").result()
        unlike = [train(fresh, data)[0].metrics["loss:sum"] for _ in range(3)]
        assert unlike[0] == expected[0]
        assert unlike[1:] != expected[1:], "without the optimizer's state"
    rest = tinker.RestClient(base_url=address, api_key=KEY)
    run = rest.get_training_run_by_tinker_path(path).result()
    assert (run.base_model, run.lora_rank) == (NAME, 5)
    assert run.last_checkpoint.user_metadata == {"a": "b"}
    rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(Exception, match="does not exist"):
        service.create_training_client_from_state(path).result()


@pytest.mark.filterwarnings("ignore:DEPRECATED. TrainingClient.load_state")
def test_a_model_takes_over_a_checkpoint(service, address, state):
    data = [datum("hello")]
    client = service.create_lora_training_client(NAME, rank=3, seed=7).result()
    train(client, data, steps=2)
    path = client.save_state("taken").result().path
    expected = [train(client, data)[0].metrics["loss:sum"] for _ in range(3)]
    other = service.create_lora_training_client(NAME, rank=5, seed=8).result()
    train(other, data)
    for load, is_same in ((other.load_state_with_optimizer, True), (other.load_state, False)):
        other.forward_backward(data, "cross_entropy").result()
        load(path).result()
        # The client itself answers with what it has asked for.
        body = json.dumps({"model_id": other.model_id}).encode()
        assert json.loads(post(address, "get_info", body)[1])["lora_rank"] == 3
        with pytest.raises(tinker.RequestFailedError, match="optim_step needs gradients"):
            other.optim_step(types.AdamParams()).result()
        found = [train(other, data)[0].metrics["loss:sum"] for _ in range(3)]
        assert (found == expected) is is_same
        assert found[0] == expected[0]
    before = other.forward(data, "cross_entropy").result().metrics
    (Path(state) / "checkpoints" / path.removeprefix("tinker://") / "adapter_set.json").unlink()
    with pytest.raises(Exception, match="it is no saved set of adapters"):
        other.load_state(path).result()
    assert other.forward(data, "cross_entropy").result().metrics == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": [1.0]}, "1 values and shape"),
        ({"advantages": [1.0, 1.0]}, r"missing \[\], not known \['advantages'\]"),
        ({"target_tokens": [0, 9999]}, r"\[1\]=9999 is no token: the vocabulary has 258"),
        ({"weights": [1.0, float("nan")]}, r"\['weights'\]\[1\]=nan is not finite"),
    ],
)
def test_bad_data_is_named_and_the_client_goes_on(service, change, message):
    client = service.create_lora_training_client(NAME, rank=2, seed=1).result()
    good, bad = datum("abc"), datum("abc", **change)
    with pytest.raises(Exception, match=message):
        client.forward_backward([good, bad], "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match="optim_step needs gradients"):
        client.optim_step(types.AdamParams()).result()
    assert train(client, [good])[1].metrics["skipped"] == 0.0


@pytest.mark.filterwarnings("ignore:DEPRECATED. TrainingClient.load_state")
def test_a_client_goes_on_after_requests_that_are_refused(service):
    client = service.create_lora_training_client(NAME, rank=2, seed=1).result()
    good = datum("abc")
    for refused in (
        lambda: client.save_state("../outside"),
        lambda: client.optim_step(types.AdamParams(learning_rate=-1.0)),
        lambda: client.optim_step(types.AdamParams(eps=0.0)),
        lambda: client.save_weights_for_sampler("a/b"),
        lambda: client.load_state("elsewhere"),
        lambda: client.forward_backward([good], "other"),
    ):
        with pytest.raises(Exception, match=r"path=|learning_rate=|eps=|loss_fn="):
            refused().result()
    # Their numbers are counted: the next request waits for none of them.
    assert train(client, [good])[1].metrics["skipped"] == 0.0


def test_what_reads_the_model_keeps_its_gradients(service):
    client, other = (
        service.create_lora_training_client(NAME, rank=4, seed=6).result() for _ in range(2)
    )
    data = [datum("hello")]
    expected = train(client, data), client.forward(data, "cross_entropy").result().metrics
    other.forward_backward(data, "cross_entropy").result()
    other.forward(data, "cross_entropy").result()
    other.save_state("pending").result()
    sampler = other.save_weights_and_get_sampling_client().result()
    settings = types.SamplingParams(max_tokens=2)
    sampler.sample(types.ModelInput.from_ints([5]), 1, settings).result()
    step = other.optim_step(types.AdamParams(**ADAM)).result()
    assert step.metrics == expected[0][1].metrics
    assert other.forward(data, "cross_entropy").result().metrics == expected[1]


def test_models_that_cannot_be_made_take_no_room(service, state):
    with pytest.raises(Exception, match="train_attn=False and train_mlp=False"):
        service.create_lora_training_client(NAME, train_attn=False, train_mlp=False).result()
    client = service.create_lora_training_client(NAME, rank=2).result()
    path = client.save_state("broken").result().path
    directory = Path(state) / "checkpoints" / path.removeprefix("tinker://")
    (directory / "adapter_set.json").unlink()
    for _ in range(LIMITS.max_models):
        with pytest.raises(Exception, match="it is no saved set of adapters"):
            service.create_training_client_from_state(path).result()
    assert service.create_lora_training_client(NAME, rank=2).result().get_info().lora_rank == 2


def test_bad_calls_are_named(service, address):
    with pytest.raises(Exception, match="base_model='other' is not served: only 'tiny'"):
        service.create_lora_training_client("other").result()
    with pytest.raises(Exception, match=f"lora_config.rank=9 is above {MAX_RANK}"):
        service.create_lora_training_client(NAME, rank=9).result()
    client = service.create_lora_training_client(NAME, rank=2).result()
    with pytest.raises(Exception, match="loss_fn='stable_reinforce' is not supported"):
        client.forward_backward([datum("abc")], "stable_reinforce").result()
    with pytest.raises(Exception, match=r"loss_fn_config\['beta'\]=1.0: 'cross_entropy' takes"):
        client.forward_backward([datum("abc")], "cross_entropy", {"beta": 1.0}).result()
    with pytest.raises(Exception, match=r"data\[0\] has 64 tokens and a target behind them"):
        client.forward_backward([datum("a" * 65)], "cross_entropy").result()
    with pytest.raises(Exception, match="path="):
        client.save_state("../outside").result()
    sampler = service.create_sampling_client(base_model=NAME, record_stability_info=True).result()
    prompt, settings = types.ModelInput.from_ints([5]), types.SamplingParams(max_tokens=1)
    with pytest.raises(Exception, match="record_stability_info=True belongs to the loss"):
        sampler.sample(prompt, 1, settings).result()


def post(address, path, body, *, key=KEY):
    request = urllib.request.Request(f"{address}/api/v1/{path}", data=body, method="POST")
    if key is not None:
        request.add_header("X-API-Key", key)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@pytest.mark.parametrize("key", [None, "", "tml-other", KEY + "x"])
def test_another_key_gets_nothing(address, key):
    status, body = post(address, "create_session", b"{}", key=key)
    assert status == 401
    assert KEY.encode() not in body


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 422, "no JSON"),
        (b"[]", 422, "expected an object, got list"),
        (b"[" * 90_000, 422, "no JSON"),
        (b'{"session_id": 3}', 422, "session_id=3"),
        (b'{"session_id": "a", "new": 1}', 422, "new=1 is not supported by this server"),
        (b'{"session_id": "a", "new": null}', 422, "session_id='a' is unknown"),
        (b"a" * (MAX_BYTES + 1), 413, f"tinker.max_request_bytes={MAX_BYTES}"),
    ],
)
def test_bad_bodies(address, body, status, message):
    found, answer = post(address, "session_heartbeat", body)
    assert (found, message in json.loads(answer)["error"]) == (status, True), answer


def test_a_body_of_unknown_length_has_the_same_limit(address):
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=PATIENCE_S)
    parts = [b"a" * (MAX_BYTES // 2)] * 3
    headers = {"X-API-Key": KEY, "Transfer-Encoding": "chunked"}
    connection.request(
        "POST", "/api/v1/session_heartbeat", iter(parts), headers, encode_chunked=True
    )
    answer = connection.getresponse()
    assert answer.status == 413
    assert f"tinker.max_request_bytes={MAX_BYTES}" in json.loads(answer.read())["error"]
    connection.close()


def test_a_request_that_is_sent_again_is_carried_out_once(address, service):
    client = service.create_lora_training_client(NAME, rank=2, seed=1).result()
    client.forward_backward([datum("abc")], "cross_entropy").result()
    body = {"model_id": client.model_id, "seq_id": 2, "adam_params": {"learning_rate": 0.1}}
    promises = [post(address, "optim_step", json.dumps(body).encode()) for _ in range(2)]
    assert promises[0] == promises[1]
    retrieve = {"request_id": json.loads(promises[0][1])["request_id"]}
    for _ in range(2):
        status, answer = post(address, "retrieve_future", json.dumps(retrieve).encode())
        assert (status, json.loads(answer)["metrics"]["skipped"]) == (200, 0.0)
    # And one whose predecessor never comes says so.
    late = {**body, "seq_id": 9}
    _, promise = post(address, "optim_step", json.dumps(late).encode())
    retrieve = {"request_id": json.loads(promise)["request_id"]}
    _, answer = post(address, "retrieve_future", json.dumps(retrieve).encode())
    assert "request 9 waits for request 3" in json.loads(answer)["error"]


def test_a_session_that_ends_takes_its_models_with_it(address):
    with tinker.ServiceClient(base_url=address, api_key=KEY) as ending:
        client = ending.create_lora_training_client(NAME, rank=2).result()
    status, body = post(address, "get_info", json.dumps({"model_id": client.model_id}).encode())
    assert status == 422
    assert b"its session has ended" in body


def test_supervised_learning(service):
    """Doublings are learnt: the loss per token falls, and greedy samples are right."""
    client = service.create_lora_training_client(NAME, rank=8, seed=0).result()
    texts = [f"{number}+{number}={2 * number};" for number in range(5)]
    data = [datum(text, weights=[0.0, 0.0, 0.0] + [1.0] * (len(text) - 4)) for text in texts]
    losses = [
        train(client, data, learning_rate=0.02, weight_decay=0.0)[0].metrics["loss:sum"]
        for _ in range(60)
    ]
    assert losses[-1] < 0.1 * losses[0]
    sampler = client.save_weights_and_get_sampling_client().result()
    settings = types.SamplingParams(max_tokens=2, temperature=0.0)
    for text in texts:
        prompt = types.ModelInput.from_ints(tokens(text[:4]))
        (found,) = sampler.sample(prompt, 1, settings).result().sequences
        assert build_tokenizer().decode(found.tokens) == text[4:6]


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_reinforcement_learning(service, loss):
    """Tokens of an even number are rewarded, and become more frequent."""
    client = service.create_lora_training_client(NAME, rank=8, seed=0).result()
    prompts = [types.ModelInput.from_ints(tokens(text)) for text in ("a", "b")]
    means = []
    for step in range(40):
        sampler = client.save_weights_and_get_sampling_client().result()
        settings = types.SamplingParams(max_tokens=6, stop=[], seed=step)
        futures = [sampler.sample(prompt, 24, settings) for prompt in prompts]
        data, rewards = [], []
        for prompt, future in zip(prompts, futures, strict=True):
            sequences = future.result().sequences
            found = [np.mean([token % 2 == 0 for token in each.tokens]) for each in sequences]
            rewards += found
            for sequence, reward in zip(sequences, found, strict=True):
                data.append(_rl_datum(prompt.to_ints(), sequence, reward - float(np.mean(found))))
                if loss == "gspo":
                    mask = [1.0] * len(sequence.tokens)
                    data[-1].loss_fn_inputs["sequence_ratio_mask"] = types.TensorData(
                        data=mask, dtype="float32", shape=[len(mask)]
                    )
        means.append(float(np.mean(rewards)))
        train(client, data, loss=loss, learning_rate=0.05, weight_decay=0.0, eps=1e-8)
    assert np.mean(means[-3:]) > np.mean(means[:3]) + 0.2, means


def _rl_datum(prompt, sequence, advantage):
    before = len(prompt) - 1
    values = {
        "target_tokens": [0] * before + sequence.tokens,
        "logprobs": [0.0] * before + sequence.logprobs,
        "advantages": [0.0] * before + [advantage] * len(sequence.tokens),
    }
    ids = prompt + sequence.tokens[:-1]
    return types.Datum(model_input=types.ModelInput.from_ints(ids), loss_fn_inputs=values)
