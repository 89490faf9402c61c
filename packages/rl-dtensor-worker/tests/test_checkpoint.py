import shutil
import threading

import checkpoint_ranks
import pytest
import scoring_ranks
import torch
from oracle import largest_difference, load, plain_logprobs, plain_training
from patience import PATIENCE_S
from rank_pool import RankFailure, RankPool, rank_context
from rl_interfaces.backend.checkpoint.checkpointer import Checkpointer, PendingSave
from safetensors.torch import load_file
from tiny_checkpoints import save_model
from tiny_model import build_tiny_model, make_batch, make_config
from tolerances import assert_alike, assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture(scope="module")
def saved(pools, tiny_model, tmp_path_factory):
    """A checkpoint of two ranks after one `train` call, and what the next call gave."""
    directory = tmp_path_factory.mktemp("checkpoint")
    arguments = {"config": _config(tiny_model), "batch": make_batch(8), "directory": str(directory)}
    return arguments, pools(2).run(checkpoint_ranks.train_save_train, **arguments)


LINEAR = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1}}


def _config(model):
    return make_config(model, scheduler=LINEAR)


@pytest.mark.promise
def test_a_new_process_continues_bit_for_bit(saved):
    arguments, uninterrupted = saved
    fresh = RankPool(2)
    try:
        resumed = fresh.run(checkpoint_ranks.load_and_train, **arguments)
    finally:
        fresh.close()
    for before, after in zip(uninterrupted, resumed, strict=True):
        assert_bitwise_equal(before, after)


def assert_bitwise_equal(left, right):
    """Check loss, norm, learning rate, shards and samples of two ranks."""
    assert torch.equal(left.result["global_loss"], right.result["global_loss"])
    assert torch.equal(left.result["grad_norm"], right.result["grad_norm"])
    assert left.result["all_mb_metrics"]["lr"] == right.result["all_mb_metrics"]["lr"]
    assert all(torch.equal(left.shards[name], right.shards[name]) for name in left.shards)
    assert torch.equal(left.sampled, right.sampled)


@pytest.mark.slow_beyond(1)
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_another_layout_continues(saved, pools, num_ranks):
    arguments, uninterrupted = saved
    resumed, *_ = pools(num_ranks).run(checkpoint_ranks.load_and_train, **arguments)
    # The same numbers in another order of summation; the rates are below the oracle's.
    oracle = plain_training(
        arguments["config"]["model_name"], arguments["batch"], global_batch_size=4, num_calls=2
    )
    for name, parameter in resumed.parameters.items():
        before = uninterrupted[0].parameters[name]
        assert_alike(parameter, before, oracle.parameters[name], name)


@pytest.mark.promise
def test_the_hugging_face_directory_loads_with_equal_logits(saved, pools):
    arguments, _ = saved
    hf = f"{arguments['directory']}/hf"
    model = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32)
    batch = make_batch(5, seed=3)
    weights = f"{arguments['directory']}/weights"
    parameters = pools(2).run(
        checkpoint_ranks.load_only, config=arguments["config"], weights_path=weights
    )[0]
    assert largest_difference(parameters, dict(model.named_parameters())) == 0
    config = make_config(hf)
    scores = torch.cat(pools(2).run(scoring_ranks.score, config=config, batch=batch))
    expected = plain_logprobs(model.eval(), batch)
    assert_close(scores, expected)
    tokenizer = AutoTokenizer.from_pretrained(f"{arguments['directory']}/tokenizer")
    assert tokenizer.eos_token == "<eos>"


def test_saving_over_a_checkpoint_replaces_all_of_it(pools, tiny_model, tmp_path):
    config = make_config(tiny_model)
    (tmp_path / "weights.partial").mkdir()  # what a crash leaves
    (tmp_path / "weights.old").mkdir()
    (tmp_path / "weights.partial" / "junk.safetensors").write_bytes(b"half-written")
    saved = pools(2).run(checkpoint_ranks.save_twice, config=config, directory=str(tmp_path))[0]
    loaded = pools(2).run(
        checkpoint_ranks.load_only, config=config, weights_path=str(tmp_path / "weights")
    )[0]
    assert largest_difference(saved, loaded) == 0
    assert largest_difference(loaded, dict(load(tiny_model).named_parameters())) > 0
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]


def test_a_start_that_fails_leaves_nothing_open(pools, tiny_model):
    for start in pools(2).run(checkpoint_ranks.start_from_nothing, config=make_config(tiny_model)):
        assert start.closed == ["Checkpointer", "WeightTransfer"]
        assert not start.is_in_group
        assert "weights_path='/no/such/checkpoint'" in start.error


def test_what_is_no_checkpoint_is_named(saved, pools, tmp_path):
    arguments, _ = saved
    weights = f"{arguments['directory']}/weights"
    empty = tmp_path / "empty"
    empty.mkdir()
    other = build_tiny_model(tmp_path / "other", tied=False)
    without_state = tmp_path / "without_state"
    shutil.copytree(f"{arguments['directory']}/optimizer", without_state)
    (without_state / "state.pt").unlink()
    cases = [
        ({"config": arguments["config"], "weights_path": str(empty)}, ["empty", "complete.json"]),
        ({"config": make_config(other), "weights_path": weights}, ["lacks", "lm_head.weight"]),
        (
            {
                "config": arguments["config"],
                "weights_path": weights,
                "optimizer_path": str(without_state),
            },
            ["without_state", "state.pt"],
        ),
    ]
    for kwargs, words in cases:
        with pytest.raises(RankFailure) as failure:
            pools(2).run(checkpoint_ranks.load_only, **kwargs)
        assert failure.value.kind == "ValueError"
        assert all(word in failure.value.text for word in words)


ADAM = {"name": "torch.optim.Adam", "kwargs": {"lr": 0.1}}


MOMENTUM = {"name": "torch.optim.SGD", "kwargs": {"lr": 0.1, "momentum": 0.9}}


FACTORED = {"name": "torch.optim.Adafactor", "kwargs": {"lr": 1e-2}}


# SGD counts no steps, Adafactor has rows and columns (torch's takes no parameters over ranks), and
# nobody has state before the first step.
@pytest.mark.parametrize(
    ("change", "num_before", "num_ranks"),
    [({"optimizer": MOMENTUM}, 2, 2), ({"optimizer": FACTORED}, 2, 1), ({}, 0, 2)],
    ids=["momentum", "factored", "before the first step"],
)
def test_a_load_gives_the_optimizer_what_the_save_holds(
    pools, tiny_model, tmp_path, change, num_before, num_ranks
):
    arguments = {
        "config": make_config(tiny_model, **change),
        "batch": make_batch(4),
        "directory": str(tmp_path),
    }
    ranks = pools(num_ranks)
    outcomes = ranks.run(checkpoint_ranks.continue_and_load, **arguments, num_before=num_before)
    resumed = ranks.run(checkpoint_ranks.resume, **arguments)
    for outcome, anew in zip(outcomes, resumed, strict=True):
        for name, shard in outcome.continued.items():
            assert torch.equal(shard, outcome.loaded[name])
            assert torch.equal(shard, anew[name])


def test_a_load_that_is_refused_changes_nothing(saved, pools, tmp_path):
    arguments, _ = saved
    paths = {
        f"{part}_path": f"{arguments['directory']}/{part}" for part in ("weights", "optimizer")
    }
    other = make_config(build_tiny_model(tmp_path / "other", tied=False))
    shallow = make_config(build_tiny_model(tmp_path / "shallow", num_layers=1))
    saved_config = arguments["config"]
    constant = {key: value for key, value in saved_config.items() if key != "scheduler"}
    parts = [{"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {}}, LINEAR]
    listed = [*parts, {"milestones": [1]}]
    for config, words in (
        (other, ["lacks", "lm_head.weight"]),
        (shallow, ["weights_path", "12 tensors that this one lacks", "model.layers.1."]),
        (saved_config | {"optimizer": MOMENTUM}, ["optimizer_path", "AdamW", "SGD"]),
        (saved_config | {"optimizer": ADAM}, ["optimizer_path", "adamw.AdamW", "adam.Adam"]),
        (saved_config | {"scheduler": listed}, ["LinearLR, the", "ConstantLR, torch"]),
        (constant, ["scheduler is torch.optim.lr_scheduler.LinearLR", "LambdaLR"]),
    ):
        for refused in pools(2).run(
            checkpoint_ranks.refused_load, config=config, batch=make_batch(4), **paths
        ):
            assert all(word in refused.error for word in words), refused.error
            assert refused.is_unchanged


@pytest.fixture(scope="module")
def async_config(tiny_model):
    section = {"enabled": True, "async_checkpoint": True}
    return make_config(tiny_model, dtensor_cfg=section)


def test_a_save_in_the_background_is_of_the_moment_it_was_asked_for(pools, async_config, tmp_path):
    outcomes = pools(2).run(
        checkpoint_ranks.train_while_saving,
        config=async_config,
        batch=make_batch(8),
        directory=str(tmp_path),
    )
    for outcome in outcomes:
        assert not outcome.is_on_disk
        assert_bitwise_equal(outcome.first, outcome.again)


@pytest.mark.parametrize("in_background", [False, True])
def test_what_cannot_be_written_is_reported_on_every_rank(
    pools, tiny_model, async_config, tmp_path, in_background
):
    (tmp_path / "file").write_text("")
    config = async_config if in_background else make_config(tiny_model)
    outcomes = pools(2).run(
        checkpoint_ranks.saves_that_fail, config=config, directory=str(tmp_path)
    )
    for outcome in outcomes:
        assert "RuntimeError: the checkpoint" in outcome.under_a_file
        assert "file/weights" in outcome.under_a_file
        assert "Not a directory" in outcome.under_a_file
        for text in (outcome.no_room, outcome.no_room_again):
            assert "RuntimeError: the checkpoint" in text
            assert f"{tmp_path}/weights" in text
            assert "rank 1 failed: OSError" in text
            assert "File too large" in text
        assert "no save has written it" in outcome.existing
        assert outcome.is_loaded
    assert {path.name for path in tmp_path.iterdir()} == {"file", "weights", "mine"}


def test_a_save_that_took_too_long_still_says_what_it_failed_with(tmp_path):
    may_fail = threading.Event()

    def write():
        assert may_fail.wait(PATIENCE_S)
        raise RuntimeError("planted")

    checkpointer = Checkpointer(
        None, timeout_s=0.01, device=torch.device("cpu"), in_background=True
    )
    checkpointer._pending = pending = PendingSave(write, path=tmp_path, device=torch.device("cpu"))
    for _ in range(2):
        with pytest.raises(TimeoutError, match="was not written within"):
            checkpointer.finish()
    may_fail.set()
    pending._thread.join()
    with pytest.raises(RuntimeError, match="planted"):
        checkpointer.finish()
    checkpointer.finish()


def test_a_save_is_written_on_the_device_of_its_rank(tmp_path):
    """A new thread starts on the first GPU, whichever is the rank's."""
    written = []
    count = torch.cuda.device_count()
    device = torch.device("cuda", max(count - 1, 0))
    pending = PendingSave(
        lambda: written.append(torch.cuda.current_device() if count else 0),
        path=tmp_path,
        device=device,
    )
    pending.wait(PATIENCE_S)
    if count:
        pending.check()
        assert written == [device.index]
        return
    # Here the thread is refused its device, and so writes nothing on another.
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|accelerator|NVIDIA"):
        pending.check()
    assert written == []


def test_a_process_ends_though_a_save_does_not():
    process = rank_context().Process(target=checkpoint_ranks.leave_save_running)
    process.start()
    process.join(timeout=PATIENCE_S)
    has_ended = not process.is_alive()
    process.kill()
    assert has_ended
    assert process.exitcode == 0


def test_a_tokenizer_that_a_save_in_the_background_would_replace_is_refused(
    pools, async_config, tmp_path
):
    outcomes = pools(2).run(
        checkpoint_ranks.save_with_tokenizer,
        config=async_config,
        weights_path=f"{tmp_path}/weights",
        tokenizer_paths=[f"{tmp_path}/weights", f"{tmp_path}/weights/inside", f"{tmp_path}/beside"],
    )
    for inside, further_inside, beside in outcomes:
        for text in (inside, further_inside):
            assert f"tokenizer_path='{tmp_path}/weights" in text
            assert "a separate directory" in text
        assert beside == "saved"
    assert {path.name for path in tmp_path.iterdir()} == {"weights", "beside"}
    AutoTokenizer.from_pretrained(tmp_path / "beside")


def test_directories_of_different_saves_are_not_mixed(saved, pools, tmp_path):
    arguments, _ = saved
    pools(2).run(
        checkpoint_ranks.train_save_train,
        **(arguments | {"directory": str(tmp_path)}),
    )
    with pytest.raises(RankFailure) as failure:
        pools(2).run(
            checkpoint_ranks.load_only,
            config=arguments["config"],
            weights_path=f"{arguments['directory']}/weights",
            optimizer_path=f"{tmp_path}/optimizer",
        )
    assert failure.value.kind == "ValueError"
    assert "different saves" in failure.value.text


@pytest.mark.parametrize("name", ["qwen2_tied", "qwen3_moe"])
def test_an_export_in_several_files_has_the_names_and_bits_of_its_source(pools, tmp_path, name):
    source = save_model(tmp_path / "source", name)
    pools(2).run(
        checkpoint_ranks.export, config=make_config(source), path=f"{tmp_path}/hf", max_bytes=20_000
    )
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    original = load_file(f"{source}/model.safetensors")
    exported = {key: value for file in files for key, value in load_file(file).items()}
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[key], original[key]) for key in original)
    ours, plain = load(f"{tmp_path}/hf"), load(source)
    assert largest_difference(dict(ours.named_parameters()), dict(plain.named_parameters())) == 0
    assert type(ours) is type(plain)


def test_shards_over_two_axes_load_into_another_layout(pools, tmp_path):
    source = save_model(tmp_path / "source", "qwen2_tied")
    pools(4).run(checkpoint_ranks.save_over_two_axes, model_name=source, directory=str(tmp_path))
    expected = dict(load(source).named_parameters())
    noisy, *_ = pools(2).run(
        checkpoint_ranks.load_only,
        config=make_config(source),
        weights_path=f"{tmp_path}/weights",
    )
    assert all(torch.equal(noisy[name], tensor + 1) for name, tensor in expected.items())
    exported = dict(load(f"{tmp_path}/hf").named_parameters())
    assert largest_difference(exported, noisy) == 0
