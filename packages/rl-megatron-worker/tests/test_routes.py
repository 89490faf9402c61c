"""Router replay: routes agree in all layouts, and replayed ones give what transformers gives."""

from unittest import mock

import pytest
import torch
import worker_ranks
from batches import make_batch, make_config
from parity_checks import LAYOUTS, assert_parameters, joined, num_layers_of
from plain_loop import load, plain_logprobs, plain_training
from rl_megatron_worker import MegatronPolicyWorker
from rl_megatron_worker.model.routes import FREE, TokenChoice, check_routes
from tiny_models import build_tiny
from tolerances import REPEATED, assert_close
from transformers import AutoConfig

# Layout, the section by which micro-batches are planned, further settings.
CASES = {
    "dp2": ("dp2", None, {}),
    "dp2, packed": ("dp2", "sequence_packing", {}),
    "tp2 with sequence parallelism": ("tp2_sp", None, {}),
    "cp2, packed": ("cp2", "sequence_packing", {}),
    "pp2, virtual stages": ("pp2_virtual", None, {}),
    "ep2": ("ep2", None, {}),
    "dp2, recomputed": ("dp2", None, {"activation_checkpointing": True}),
    "pp2, recomputed": ("pp2", None, {"activation_checkpointing": True}),
}
SOME_LAYERS = {"mlp_only_layers": [0]}


def config_of(path, layout, section, **settings):
    budgets = {
        "train_mb_tokens": worker_ranks.BUDGET,
        "logprob_mb_tokens": worker_ranks.BUDGET,
    }
    sections = {} if section is None else {section: {"enabled": True, **budgets}}
    sizes = LAYOUTS[layout][1] | {"moe_router_replay": True} | settings
    return make_config(path, sections=sections, **sizes)


def drawn_routes(batch, num_layers, *, num_experts=4, num_chosen=2):
    """Return experts at random, some tokens free."""
    shape = (*batch["input_ids"].shape, num_layers, num_experts)
    draw = torch.Generator().manual_seed(5)
    routes = torch.rand(shape, generator=draw).argsort(-1)[..., :num_chosen]
    is_free = torch.rand(routes.shape[:3], generator=draw) < 0.2
    return routes.masked_fill(is_free[..., None], FREE).to(torch.int16)


def replaying(routes):
    """Patch torch so that a model of transformers takes `routes`, `[batch, seq, layers, chosen]`.

    It has to run the rows in turn: one by one as long as they are, or several in full width.
    """
    own, calls = torch.topk, iter(range(10**6))
    width, num_layers = routes.shape[1:3]

    def topk(scores, k, *arguments, **options):
        if scores.shape[-1] != 4 or k != 2:
            return own(scores, k, *arguments, **options)
        num_rows = max(1, len(scores) // width)
        pass_, layer = divmod(next(calls), num_layers)
        start = pass_ * num_rows % len(routes)
        given = routes[start : start + num_rows, :, layer].flatten(0, 1)[: len(scores)].long()
        chosen = own(scores, k, *arguments, **options)[1]
        chosen = torch.where(given[:, :1] == FREE, chosen, given)
        return scores.gather(-1, chosen), chosen

    return mock.patch.object(torch, "topk", topk)


@pytest.mark.slow_beyond(3)
@pytest.mark.parametrize("case", CASES)
def test_routes_are_recorded_and_taken_in_every_layout(pools, tmp_path, case):
    layout, section, settings = CASES[case]
    num_ranks, layers = LAYOUTS[layout][0], num_layers_of(layout)
    path = build_tiny(tmp_path, "qwen3_moe", num_hidden_layers=layers)
    batch = make_batch(8)
    routes = drawn_routes(batch, layers)
    (alone,) = pools(1).run(
        worker_ranks.replay_routes, config=config_of(path, "dp2", None), batch=batch, section=None
    )
    results = pools(num_ranks).run(
        worker_ranks.replay_routes,
        config=config_of(path, layout, section, **settings),
        batch=batch,
        section=section,
        routes=routes,
    )
    assert not any(result["given_back"] for result in results)
    is_token = torch.arange(batch["input_ids"].shape[1]) < batch["input_lengths"][:, None]
    recorded = joined(results, "routed_experts")
    assert recorded.dtype == torch.int16
    # The order of a token's experts says nothing.
    assert torch.equal(
        recorded[is_token].sort(-1).values, alone["routed_experts"][is_token].sort(-1).values
    )
    assert (recorded[~is_token] == FREE).all()

    free = plain_logprobs(load(path), batch)
    with replaying(routes):
        expected = plain_logprobs(load(path), batch)
        parameters, losses, _ = plain_training(path, batch, global_batch_size=4, num_calls=2)
    assert (expected.exact - free.exact).abs().max() > 100 * expected.bound
    for name, wanted in (("logprobs", expected), ("reference", free)):
        assert_close(joined(results, name), wanted, name)
    for result in results:
        assert_close(result["losses"], losses, "losses")
        assert_parameters(result["parameters"], parameters)


def test_routes_of_all_layers_are_taken_where_some_have_no_experts(pools, tmp_path):
    """An engine's routes have a place for each layer, with zeros where there is no router."""
    path, batch = build_tiny(tmp_path, "deepseek_v3", num_hidden_layers=3), make_batch(6)
    model = AutoConfig.from_pretrained(path)
    dense = model.first_k_dense_replace
    assert dense == 1
    sizes = {"num_experts": model.n_routed_experts, "num_chosen": model.num_experts_per_tok}
    routes = drawn_routes(batch, 3 - dense, **sizes)
    of_all = torch.cat([torch.zeros_like(routes[:, :, :dense]), routes], 2)
    config = config_of(path, "dp2", None)
    own, alone, whole = (
        pools(1).run(worker_ranks.score_with_routes, config=config, batch=given)[0]["logprobs"]
        for given in (batch, *({**batch, "routed_experts": each} for each in (routes, of_all)))
    )
    assert torch.equal(whole, alone)
    assert (own - alone).abs().max() > 100 * REPEATED * own.abs().max()


@pytest.mark.parametrize("kind", ["deepseek_v2", "glm4_moe"])
def test_routes_to_groups_of_experts_are_those_of_transformers(pools, tmp_path, kind):
    path, batch = build_tiny(tmp_path, kind, num_hidden_layers=3), make_batch(6)
    config = config_of(path, "dp2", None)
    (found,) = pools(1).run(worker_ranks.score_with_routes, config=config, batch=batch)
    model, chosen = load(path), []
    for module in model.modules():
        if type(module).__name__.endswith("TopkRouter"):
            module.register_forward_hook(lambda _, __, output: chosen.append(output[2]))
    for row, length in enumerate(batch["input_lengths"].tolist()):
        chosen.clear()
        model(batch["input_ids"][row : row + 1, :length])
        expected = torch.stack(chosen, 1).sort(-1).values
        routes = found["routed_experts"][row, :length]
        assert torch.equal(routes.sort(-1).values.long(), expected)
    again = {**batch, "routed_experts": found["routed_experts"].flip(-1)}
    (replayed,) = pools(1).run(worker_ranks.score_with_routes, config=config, batch=again)
    expected = plain_logprobs(model, batch)
    for each in (found, replayed):
        assert_close(each["logprobs"], expected)


@pytest.mark.slow
def test_replayed_routes_lower_the_mismatch_in_bfloat16(pools, tmp_path):
    """Two layouts round scores otherwise, and tokens near a boundary take other experts."""
    path = build_tiny(tmp_path, "qwen3_moe", num_hidden_layers=4)
    batch = make_batch(64)

    def scored(num_ranks, rows, **sizes):
        config = make_config(path, moe_router_replay=True, **sizes) | {"precision": "bfloat16"}
        results = pools(num_ranks).run(worker_ranks.score_with_routes, config=config, batch=rows)
        return {key: joined(results, key) for key in results[0] if key not in ("place", "order")}

    alone = scored(1, batch)
    sharded = LAYOUTS["tp2_sp"][1]
    free = scored(2, batch, **sharded)
    again = scored(2, {**batch, "routed_experts": alone["routed_experts"]}, **sharded)
    is_token = torch.arange(batch["input_ids"].shape[1]) < batch["input_lengths"][:, None]
    agree = (alone["routed_experts"].sort(-1).values == free["routed_experts"].sort(-1).values).all(
        -1
    )
    assert not agree[is_token].all(), "no token takes other experts: nothing to lower"
    mismatch = [(each["logprobs"] - alone["logprobs"]).abs() for each in (free, again)]
    assert mismatch[1].max() < 0.5 * mismatch[0].max()
    assert mismatch[1].sum() < mismatch[0].sum()


@pytest.mark.parametrize(
    ("routes", "named"),
    [
        (torch.zeros(2, 3, 2, 2), "must be a tensor of integers"),
        (torch.zeros(2, 3, 1, 2).int(), r"shape \[2, 3, 1, 2\], expected \[2, 3, 2, 2\]"),
        (torch.tensor([0, 4]).expand(2, 3, 2, 2), "values from 0 to 4, expected 0 to 3"),
        (torch.tensor([1, 1]).expand(2, 3, 2, 2), "the same expert twice"),
        (torch.tensor([1, FREE]).expand(2, 3, 2, 2), "less than 2 experts"),
    ],
)
def test_routes_of_another_model_are_refused(routes, named):
    columns = {"input_ids": torch.zeros(2, 3).long(), "input_lengths": torch.tensor([3, 2])}
    sizes = {"num_layers": 2, "num_experts": 4, "num_chosen": 2}
    with pytest.raises(ValueError, match=rf"routed_experts .*{named}"):
        check_routes({**columns, "routed_experts": routes}, **sizes)
    # That of padding may be anything.
    right = torch.tensor([3, 1]).repeat(2, 3, 2, 1)
    right[1, 2] = 0
    check_routes({**columns, "routed_experts": right}, **sizes)


def test_a_dense_model_has_no_routers(tmp_path):
    path = build_tiny(tmp_path, "qwen3")
    config = make_config(path, moe_router_replay=True)
    with pytest.raises(ValueError, match=r"moe_router_replay=True: qwen3 models .* no experts"):
        MegatronPolicyWorker.validate_config(config, world_size=1)
    MegatronPolicyWorker.validate_config(make_config(path, freeze_moe_router=True), world_size=1)


@pytest.mark.parametrize("is_distributed", [False, True])
def test_frozen_routers_stay_and_all_else_is_trained(pools, tmp_path, is_distributed):
    path = build_tiny(tmp_path, "qwen3_moe")
    config = make_config(path, freeze_moe_router=True)
    config["megatron_cfg"]["optimizer"]["use_distributed_optimizer"] = is_distributed
    (found, _) = pools(2).run(
        worker_ranks.train_and_look, config=config, batch=make_batch(8), loss="nll"
    )
    before, after = found["before"], found["after"]
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    routers = {name for name in before if name.endswith("mlp.gate.weight")}
    assert len(routers) == 4
    assert changed == before.keys() - routers


def test_biases_of_routers_that_would_have_to_change_are_refused(tmp_path):
    for kind in ("qwen3_moe", "deepseek_v3"):
        path = build_tiny(tmp_path / kind, kind)
        MegatronPolicyWorker.validate_config(
            make_config(path, moe_router_bias_update_rate=0.0), world_size=1
        )
        config = make_config(path, moe_router_bias_update_rate=0.001)
        if kind == "qwen3_moe":
            # It has none.
            MegatronPolicyWorker.validate_config(config, world_size=1)
            continue
        with pytest.raises(ValueError, match=r"moe_router_bias_update_rate=0.001: the biases of"):
            MegatronPolicyWorker.validate_config(config, world_size=1)


def test_routers_compute_in_the_dtype_that_the_config_names(pools, tmp_path):
    path, found = build_tiny(tmp_path, "qwen3_moe"), {}
    for dtype in ("fp32", "fp64"):
        config = make_config(path, moe_router_dtype=dtype)
        (found[dtype],) = pools(1).run(
            worker_ranks.router_dtypes, config=config, batch=make_batch(4)
        )
    assert found == {"fp32": {torch.float32}, "fp64": {torch.float64}}


def test_layers_that_are_computed_again_take_the_routes_of_their_own_pass():
    choice, scores = TokenChoice(), torch.randn(3, 4)
    given = [torch.tensor([[0, 1]] * 3), None, torch.tensor([[2, 3]] * 3)]

    def chosen():
        return choice.get_replay_topk(
            scores, 2, default_compute_topk=lambda *a, **_: torch.topk(*a)
        )[1].tolist()

    taken = []
    for each in given:
        with choice.forward(each, computed_again=True):
            taken.append(chosen())
    assert [chosen() for _ in given] == taken
    assert taken[0] == [[0, 1]] * 3
    assert taken[2] == [[2, 3]] * 3
    assert taken[1] == torch.topk(scores, 2)[1].tolist()
