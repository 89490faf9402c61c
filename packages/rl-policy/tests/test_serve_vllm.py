"""OpenAI's own client against engines and `rl-policy serve`, with what transformers says of it."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import rl_refit
import torch
from kept_clusters import kept_cluster
from patience import PATIENCE_S, wait_until
from rl_interfaces import NOT_SAMPLED
from rl_policy import Policy
from rl_policy.data.batches import completion_batch
from rl_policy.generation.answers import join_stream, read_answers
from rl_policy.generation.vllm import VllmGeneration
from rl_policy.generation.vllm.serving import ServerSettings
from rl_policy.losses import ClippedPGLoss
from vllm_oracles import (
    TOLERANCE,
    endless_tokenizer,
    expected_logprobs,
    generation_config,
    long_llama,
)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.needs("rl-policy[all]"),
]
openai = pytest.importorskip("openai", reason="comes with vLLM")

KEY = "a-key-of-some-length"
FIRST_VERSION = 3
TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }} {% endfor %}a:"
MESSAGES = [{"role": "user", "content": "hello"}]
NEW_TOKENS = 900


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = endless_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def first_model(tokenizer):
    return long_llama(tokenizer)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory, tokenizer, first_model):
    path = tmp_path_factory.mktemp("served")
    first_model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def cluster(shared_ray):
    cluster = kept_cluster([1], max_colocated_worker_groups=2)
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def engines(cluster, model_path, tokenizer):
    config = generation_config(model_path, max_model_len=1024, engine_kwargs={"block_size": 32})
    engines = VllmGeneration(
        cluster, config, tokenizer, timeout_s=PATIENCE_S, weight_version=FIRST_VERSION
    )
    yield engines
    engines.shutdown()


@pytest.fixture(scope="module")
def models(first_model):
    """The models of the versions that were sent."""
    return {FIRST_VERSION: first_model}


@pytest.fixture(scope="module")
def client(engines):
    (address,) = engines.serve(ServerSettings(name="tiny", api_key=KEY))
    with openai.OpenAI(base_url=address, api_key=KEY, max_retries=0, timeout=PATIENCE_S) as client:
        yield client


def chat(client, **options):
    return client.chat.completions.create(model="tiny", messages=MESSAGES, **options)


def next_model(models):
    version = max(models) + 1
    model = copy.deepcopy(models[FIRST_VERSION])
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    models[version] = model
    return version


def open_sender(engines, model):
    sender = rl_refit.RefitSender(
        rl_refit.TensorSource(model.state_dict()),
        num_receivers=engines.num_receivers,
        timeout_s=PATIENCE_S,
        bucket_bytes=32 << 10,
    )
    engines.init_transfer(sender.address)
    return sender


def require_logprobs(generated, models, *, temperature=1.0):
    """Hold that each token has its log-probability under its version; return the versions."""
    versions = generated["weight_versions"]
    found = sorted(set(versions[versions != NOT_SAMPLED].tolist()))
    for version in found:
        expected = expected_logprobs(models[version], generated, temperature=temperature)
        error = (generated["logprobs"] - expected)[versions == version].abs().max()
        assert error < TOLERANCE, version
    return found


def test_an_agent_collects_what_transformers_says(client, tokenizer, models):
    assert [each.id for each in client.models.list()] == ["tiny"]
    # An agent that knows nothing of training.
    answers = [
        chat(client, n=2, max_tokens=5),
        client.completions.create(model="tiny", prompt=["ab", "hello"], n=2, max_tokens=4),
    ]
    generated = read_answers(answers, pad_token_id=tokenizer.pad_token_id)
    assert require_logprobs(generated, models) == [max(models)]
    assert generated["generation_lengths"].tolist() == [5, 5, 4, 4, 4, 4]
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    prompts = [*[text] * 2, "ab", "ab", "hello", "hello"]
    choices = [choice for answer in answers for choice in answer.choices]
    for row, (prompt, choice) in enumerate(zip(prompts, choices, strict=True)):
        end = int(generated["unpadded_sequence_lengths"][row])
        said = choice.message.content if hasattr(choice, "message") else choice.text
        ids = generated["output_ids"][row, :end]
        # An end token may be among them, which the text does not show.
        assert tokenizer.decode(ids, skip_special_tokens=True) == prompt + said


def test_settings_of_a_request_are_those_of_its_logprobs(client, tokenizer, models):
    answers = [chat(client, max_tokens=20, temperature=0.5, seed=5) for _ in range(2)]
    generated = read_answers(answers, pad_token_id=tokenizer.pad_token_id)
    require_logprobs(generated, models, temperature=0.5)
    assert answers[0].choices[0].token_ids == answers[1].choices[0].token_ids


def test_a_stream_has_the_same(client, tokenizer, models):
    chunks = list(chat(client, n=2, max_tokens=7, stream=True))
    assert len(chunks) > 7
    generated = read_answers([join_stream(chunks)], pad_token_id=tokenizer.pad_token_id)
    assert require_logprobs(generated, models) == [max(models)]
    for index in range(2):
        text = "".join(
            part.delta.content or ""
            for chunk in chunks
            for part in chunk.choices
            if part.index == index
        )
        end = int(generated["unpadded_sequence_lengths"][index])
        ids = generated["output_ids"][index, end - 7 : end]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_requests_go_on_through_refits(client, engines, tokenizer, models):
    """One waits where the engine pauses, and one is sampled across a staged exchange."""
    with ThreadPoolExecutor(8) as pool:
        version = next_model(models)
        with open_sender(engines, models[version]) as sender:
            engines.begin_update(version)
            waiting = [pool.submit(chat, client, max_tokens=4) for _ in range(3)]
            call = engines.update(version)
            assert not any(each.done() for each in waiting)
            sender.send(version)
            engines.wait_for_update(call)
            engines.commit_update(version)
            sender.commit(version)
        answers = [each.result() for each in waiting]
        assert {answer.weight_version for answer in answers} == {version}

        running = pool.submit(chat, client, n=4, max_tokens=NEW_TOKENS)
        while not all(engines.membership.on_all_beside("is_sampling")):
            assert not running.done()
        while not running.done():
            version = next_model(models)
            with open_sender(engines, models[version]) as sender:
                engines.begin_update(version, staging="host")
                call = engines.update(version)
                sender.send(version)
                engines.wait_for_update(call)
                engines.commit_update(version)
                sender.commit(version)
        answers.append(running.result())
    generated = read_answers(answers, pad_token_id=tokenizer.pad_token_id)
    assert len(require_logprobs(generated, models)) > 2
    assert answers[-1].weight_version == min(answers[-1].choices[0].weight_versions)


def test_engines_that_sleep_keep_their_clients_waiting(client, engines, tokenizer, models):
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(chat, client, max_tokens=200)
        while not all(engines.membership.on_all_beside("is_sampling")):
            assert not running.done()
        engines.finish_generation()
        waiting = pool.submit(chat, client, max_tokens=4)
        assert len(running.result(PATIENCE_S).choices[0].token_ids) == 200
        assert not waiting.done()
        engines.prepare_for_generation()
        answers = [running.result(), waiting.result(PATIENCE_S)]
    require_logprobs(read_answers(answers, pad_token_id=tokenizer.pad_token_id), models)


def test_a_client_that_leaves_frees_its_place(client, engines):
    """A prompt that is sampled for long does not run on: nothing but the end of it wakes this."""
    stream = chat(client, max_tokens=NEW_TOKENS, n=64, stream=True)
    next(iter(stream))
    stream.close()
    wait_until(
        lambda: not any(engines.membership.on_all_beside("is_sampling")), what="no engine samples"
    )
    assert len(chat(client, max_tokens=3).choices[0].token_ids) == 3


def test_errors_are_the_clients(client, engines):
    for options, kind, message in (
        ({"max_tokens": 5000}, openai.BadRequestError, "max_model_len=1024"),
        ({"extra_body": {"use_beam_search": True}}, openai.BadRequestError, "are not samples"),
        ({"temperature": -1.0}, openai.BadRequestError, "temperature"),
        ({"tools": [{"type": "function"}]}, openai.BadRequestError, "tool"),
    ):
        with pytest.raises(kind, match=message):
            chat(client, **options)
    with pytest.raises(openai.NotFoundError, match="`other` does not exist"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.AuthenticationError, match="not this server's"):
        client.with_options(api_key="other").models.list()
    with pytest.raises(openai.NotFoundError, match="is not served"):
        client.responses.create(model="tiny", input="a")
    with pytest.raises(ValueError, match="serves already"):
        engines.serve(ServerSettings(name="tiny", api_key=KEY))


def test_a_policy_trains_on_what_an_agent_collects(client, cluster, models, tokenizer, tmp_path):
    """The worker's log-probabilities are those of the answers, before a step that changes them."""
    answers = [chat(client, n=4, max_tokens=6)]
    generated = read_answers(answers, pad_token_id=tokenizer.pad_token_id)
    batch = completion_batch(generated, advantages=torch.tensor([1.0, -1.0, 0.5, -0.5]))
    models[max(models)].save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    policy = Policy(
        cluster,
        {
            "model_name": str(tmp_path),
            "precision": "float32",
            "train_global_batch_size": 4,
            "train_micro_batch_size": 4,
            "logprob_batch_size": 4,
            "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-4}},
            "dtensor_cfg": {"enabled": True},
        },
        tokenizer,
        init_reference_model=False,
    )
    try:
        mask = batch["token_mask"].bool()
        scores = policy.get_logprobs(batch)["logprobs"]
        assert (scores - batch["generation_logprobs"])[mask].abs().max() < TOLERANCE
        policy.train(batch | {"prev_logprobs": scores}, ClippedPGLoss())
        changed = policy.get_logprobs(batch)["logprobs"] - scores
        # The loss's own slope: one completion by itself may go the other way.
        gained = (batch["advantages"] * changed * mask).sum()
        assert gained > 0
    finally:
        policy.shutdown()
