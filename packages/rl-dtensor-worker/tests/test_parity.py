"""The parity table: every layout of ranks against plain transformers and a plain loop.

By default a subset: every model in each kind of parallelism, alone or beside another one, and
every pair of a layout and a way of batching, and of a model and one. `PARITY=all` runs the table.
"""

import itertools
import os
from collections import Counter

import parity_models
import parity_ranks
import pytest
import torch
from oracle import (
    load,
    plain_logprobs,
    plain_training,
)
from parity_layouts import LAYOUTS
from safetensors.torch import load_file
from tiny_model import VOCAB_SIZE, make_batch, make_config
from tolerances import assert_all_close, assert_close

# The second one starts from the state that the first one leaves.
NUM_CALLS = 2
BATCHINGS = {"padded": None, "dynamic": "dynamic_batching", "packed": "sequence_packing"}


def kinds_of(layout):
    """Return the kinds of parallelism of a layout: what its ranks do apart, and what they share."""
    num_ranks, sizes = LAYOUTS[layout]
    tensor, context = (sizes.get(f"{name}_parallel_size", 1) for name in ("tensor", "context"))
    replicas = sizes.get("data_parallel_replicate_size", 1)
    is_of_kind = {
        "sharded": num_ranks > tensor * context and replicas != "auto",
        "replicated": replicas != 1,
        "tensor": tensor > 1 and "sequence_parallel" not in sizes,
        "sequence": "sequence_parallel" in sizes,
        "context": context > 1,
    }
    return {kind for kind, is_one in is_of_kind.items() if is_one}


def pairs_of(case):
    """Return what a case shows: see the module."""
    layout, model, batching = case
    return {(layout, batching), (model, batching), *((kind, model) for kind in kinds_of(layout))}


def covering_pairs():
    """Return cases that show all pairs; of those with as many new ones, that of fewer ranks."""
    cases = list(itertools.product(LAYOUTS, parity_models.CONFIGS, BATCHINGS))
    missing = {pair for case in cases for pair in pairs_of(case)}
    chosen = []
    while missing:
        best = max(cases, key=lambda case: (len(missing & pairs_of(case)), -LAYOUTS[case[0]][0]))
        chosen.append(best)
        missing -= pairs_of(best)
    return sorted(chosen)


def all_cases():
    return sorted(itertools.product(LAYOUTS, parity_models.CONFIGS, BATCHINGS))


def one_per_layout():
    """Return a case of each layout, which together show every model and way of batching."""
    times, chosen = Counter(), []
    for layout in LAYOUTS:
        cases = [case for case in covering_pairs() if case[0] == layout]
        chosen.append(min(cases, key=lambda case: sum(times[value] for value in case)))
        times.update(chosen[-1])
    return chosen


CASES = all_cases() if os.environ.get("PARITY") == "all" else covering_pairs()
FAST = one_per_layout()
PROMISES = [case for case in FAST if case[0] in ("dp2", "tp2_sp", "cp2")]


def marks_of(case):
    """Return the marks of a case: a few are promises, one of each layout is fast."""
    if case in PROMISES:
        return pytest.mark.promise
    return [] if case in FAST else pytest.mark.slow


PARAMETERS = [pytest.param(*case, id="-".join(case), marks=marks_of(case)) for case in CASES]


@pytest.fixture(scope="session")
def oracles(tmp_path_factory):
    """`oracles(name)` gives a model's path, and what plain transformers give for the batch."""
    known = {}

    def oracle_of(name):
        if name not in known:
            path = parity_models.build(name, tmp_path_factory.mktemp(name))
            batch = make_batch(6)
            # The second rank's first token: its row has the place that padding has on the first.
            batch["input_ids"][:, 1] = VOCAB_SIZE // 2
            model = load(path)
            # Under the names of the checkpoint, as an engine loads them.
            weights = load_file(f"{path}/model.safetensors")
            known[name] = {
                "path": path,
                "batch": batch,
                "weights": weights,
                "logprobs": plain_logprobs(model, batch),
                "training": plain_training(path, batch, global_batch_size=4, num_calls=NUM_CALLS),
            }
        return known[name]

    return oracle_of


def joined(results, key):
    """Return the rows of all data-parallel places, in the batch's order."""
    places = {result.place: result for result in results}
    rows = torch.cat([places[place].columns[key] for place in sorted(places)])
    order = places[0].order
    if order is None:
        return rows
    restored = torch.empty_like(rows)
    restored[torch.tensor(order)] = rows
    return restored


def assert_equal_parameters(found, expected, tolerance):
    assert found.keys() == expected.keys()
    differences = {
        name: float((found[name] - expected[name]).detach().abs().max()) for name in found
    }
    worst = max(differences, key=differences.__getitem__)
    assert differences[worst] <= tolerance, (worst, differences[worst])


def assert_step_of_transformers(results, path, batch):
    """Hold log-probabilities, and the parameters after a step on the batch, of every rank."""
    order = results[0].order or list(range(len(batch["input_ids"])))
    expected = plain_logprobs(load(path), batch)[order]
    parameters, _, _ = plain_training(
        path, batch, global_batch_size=len(batch["input_ids"]), num_calls=1
    )
    for result in results:
        assert_close(result.columns["logprobs"], expected)
        assert_all_close(result.parameters, parameters)


@pytest.mark.parametrize(("layout", "model", "batching"), PARAMETERS)
def test_every_layout_equals_plain_transformers(pools, oracles, layout, model, batching):
    num_ranks, sizes = LAYOUTS[layout]
    section, oracle = BATCHINGS[batching], oracles(model)
    budgets = {"train_mb_tokens": parity_ranks.BUDGET, "logprob_mb_tokens": parity_ranks.BUDGET}
    sections = {} if section is None else {section: {"enabled": True, **budgets}}
    config = make_config(oracle["path"], dtensor_cfg={"enabled": True, **sizes}, **sections)
    results = pools(num_ranks).run(
        parity_ranks.run_case,
        config=config,
        batch=oracle["batch"],
        section=section,
        num_calls=NUM_CALLS,
    )
    expected, losses, norms = oracle["training"]
    for key in ("logprobs", "reference"):
        assert_close(joined(results, key), oracle["logprobs"])
    for result in results:
        assert result.sent.keys() == oracle["weights"].keys()
        assert all(torch.equal(result.sent[n], w) for n, w in oracle["weights"].items())
        for found, plain in ((result.losses, losses), (result.grad_norms, norms)):
            assert_close(found, plain)
        assert_all_close(result.parameters, expected)
