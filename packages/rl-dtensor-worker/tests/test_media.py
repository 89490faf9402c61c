"""Images beside text: a vision-language model against plain transformers."""

from functools import partial

import checkpoint_ranks
import pytest
import scoring_ranks
import torch
import training_ranks
from oracle import plain_logprobs
from rank_pool import RankFailure
from rl_batched_data import BatchedDataDict, PackedTensor
from tiny_model import build_tokenizer, make_config
from tolerances import REPEATED, assert_close
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

IMAGE, VISION_START, WIDTH = 3, 4, 14
# One image of 4 x 4 patches, which are merged by 2 x 2 into 4 tokens.
GRID, PATCH_SIZE = (1, 4, 4), 3 * 2 * 4 * 4


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("vision")
    text = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]},
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    }
    vision = {
        "depth": 2,
        "embed_dim": 32,
        "hidden_size": 32,
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    config = Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=5,
        vision_start_token_id=VISION_START,
        vision_end_token_id=6,
    )
    torch.manual_seed(0)
    Qwen2VLForConditionalGeneration(config).save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return str(path)


def make_rows(with_image):
    """Return rows of unlike lengths; those with an image have it after two tokens of text."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([9 + row for row in range(len(with_image))])
    input_ids = torch.randint(7, 64, (len(with_image), WIDTH), generator=generator)
    for row, has_image in enumerate(with_image):
        if has_image:
            input_ids[row, 2], input_ids[row, 3:7] = VISION_START, IMAGE
    is_token = torch.arange(WIDTH) < lengths[:, None]
    input_ids = torch.where(is_token, input_ids, 0)
    images = [torch.randn(16, PATCH_SIZE, generator=generator) for _ in with_image]
    present = list(zip(images, with_image, strict=True))
    return BatchedDataDict(
        input_ids=input_ids,
        input_lengths=lengths,
        mm_token_type_ids=(input_ids == IMAGE).long(),
        token_mask=is_token.float() * (torch.arange(WIDTH) > 0),
        sample_mask=torch.ones(len(with_image)),
        pixel_values=PackedTensor([x if has else None for x, has in present], 0),
        image_grid_thw=PackedTensor(
            [torch.tensor([GRID]) if has else None for _, has in present], 0
        ),
    )


def load_model(path):
    return Qwen2VLForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()


def media_of(batch, row, length):
    """Return what a row has beside its tokens."""
    media = {
        key: batch[key].tensors[row]
        for key in ("pixel_values", "image_grid_thw")
        if batch[key].tensors[row] is not None
    }
    return {"mm_token_type_ids": batch["mm_token_type_ids"][row : row + 1, :length], **media}


@pytest.mark.parametrize("section", [None, "dynamic_batching"])
def test_logprobs_equal_plain_transformers(pools, vision_model, section):
    batch = make_rows([True, False, True, True])
    budgets = {"enabled": True, "train_mb_tokens": 32, "logprob_mb_tokens": 32}
    sections = {} if section is None else {section: budgets}
    (found,) = pools(1).run(
        scoring_ranks.call_planned,
        config=make_config(vision_model, **sections),
        batch=batch,
        section=section,
        num_tokens=32,
        method="get_logprobs",
    )
    scores = found.output["logprobs"][torch.tensor(found.order).argsort()]
    expected = plain_logprobs(load_model(vision_model), batch, inputs_of=partial(media_of, batch))
    assert_close(scores, expected)


def test_sharded_models_train_on_images(pools, vision_model):
    batch = make_rows([True, True, True, True])
    losses = []
    for num_ranks in (1, 2):
        trained, *_ = pools(num_ranks).run(
            training_ranks.train, config=make_config(vision_model), batch=batch, num_calls=2
        )
        losses.append(trained.losses.tolist())
    assert losses[0] == pytest.approx(losses[1], rel=REPEATED)
    assert losses[0][1] < losses[0][0]


def plain_completion(model, batch, row):
    """Return the prompt of a row and what transformers itself makes of it, without padding."""
    length = int(batch["input_lengths"][row])
    tokens = batch["input_ids"][row : row + 1, :length]
    return model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=8,
        do_sample=False,
        **media_of(batch, row, length),
    )[0].tolist()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_greedy_completions_equal_those_of_transformers(pools, vision_model, num_ranks):
    batch = make_rows([True, False, True, False])
    results = pools(num_ranks).run(
        scoring_ranks.generate, config=make_config(vision_model), batch=batch, greedy=True
    )
    model = load_model(vision_model)
    found = [row for result in results for row in _completions(result.outputs[-1])]
    expected = [plain_completion(model.eval(), batch, row) for row in range(4)]
    assert found == expected
    unseen = batch | {"pixel_values": PackedTensor([None] * 4, 0)}
    unseen["pixel_values"].tensors[0] = -batch["pixel_values"].tensors[0]
    unseen["pixel_values"].tensors[2] = batch["pixel_values"].tensors[2]
    assert plain_completion(model, unseen, 0) != expected[0], "the image does not matter"


def test_a_prompt_that_fills_the_text_models_positions_is_refused(pools, vision_model):
    batch = BatchedDataDict(
        input_ids=torch.full((1, 64), 7),
        input_lengths=torch.tensor([64]),
    )
    with pytest.raises(RankFailure, match="leaves no room for a token in 64 tokens"):
        pools(1).run(
            scoring_ranks.generate, config=make_config(vision_model), batch=batch, greedy=True
        )


def _completions(output):
    lengths = output["unpadded_sequence_lengths"].tolist()
    return [
        ids[:length].tolist() for ids, length in zip(output["output_ids"], lengths, strict=True)
    ]


def test_what_cannot_be_done_is_named(pools, vision_model, tiny_model):
    batch = make_rows([True, True, False, False])
    with pytest.raises(RankFailure, match="'image_grid_thw' on some ranks and none on others"):
        pools(2).run(scoring_ranks.score, config=make_config(vision_model), batch=batch)
    with pytest.raises(RankFailure, match="which Qwen2ForCausalLM does not take"):
        pools(1).run(scoring_ranks.score, config=make_config(tiny_model), batch=batch)
    packing = {"enabled": True, "train_mb_tokens": 64, "logprob_mb_tokens": 64}
    with pytest.raises(RankFailure, match=r"the batch has .* instead of policy\.sequence_packing"):
        pools(1).run(
            scoring_ranks.call_planned,
            config=make_config(vision_model, sequence_packing=packing),
            batch=batch,
            section="sequence_packing",
            num_tokens=64,
            method="get_logprobs",
        )


def test_parameters_that_got_no_gradient_yet_are_saved_and_loaded(pools, vision_model, tmp_path):
    batch = make_rows([False] * 4)
    del batch["pixel_values"], batch["image_grid_thw"]
    arguments = {
        "config": make_config(vision_model),
        "batch": batch,
        "directory": str(tmp_path),
    }
    (outcome,) = pools(1).run(checkpoint_ranks.continue_and_load, **arguments, num_before=1)
    (resumed,) = pools(1).run(checkpoint_ranks.resume, **arguments)
    for name, shard in outcome.continued.items():
        assert torch.equal(shard, outcome.loaded[name])
        assert torch.equal(shard, resumed[name])
