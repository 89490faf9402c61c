"""Dynamic sampling: which groups a step returns, and what it counts."""

import pytest
import torch
from rl_batched_data import BatchedDataDict
from rl_interfaces import NOT_SAMPLED
from rl_policy.data.datasets import Problem
from rl_policy.data.rewards import Rewards
from rl_policy.recipes.policy_gradient.resampling import resample
from rl_policy.recipes.policy_gradient.step import Rollout

PAD = 7


class Source:
    """Samples groups of two from a list: `+` has rewards 0 and 1, `-` two of 1, `x` parts alone."""

    def __init__(self, kinds, *, with_parts=False):
        self.kinds, self.taken, self.requests = kinds, 0, []
        self._with_parts = with_parts

    def __call__(self, num_groups):
        self.requests.append(num_groups)
        numbers = range(self.taken, self.taken + num_groups)
        self.taken += num_groups
        width = 2 + len(self.requests)  # rounds differ in their longest completion
        rows, problems, first, second = [], [], [], []
        for number in numbers:
            for index in range(2):
                problems.append(Problem(f"problem {number}"))
                rows.append([number, index] + [1] * (width - 2))
                kind = self.kinds[number]
                first.append({"+": float(index), "-": 1.0, "x": float(index)}[kind])
                second.append({"+": 0.0, "-": 0.0, "x": 1.0 - index}[kind])
        generated = BatchedDataDict(
            {
                "output_ids": torch.tensor(rows),
                "generation_lengths": torch.full((len(rows),), width - 1),
                "unpadded_sequence_lengths": torch.full((len(rows),), width),
                "logprobs": torch.full((len(rows), width), -1.0),
                "weight_versions": torch.full((len(rows), width), 5),
            }
        )
        rewards = [a + b for a, b in zip(first, second, strict=True)]
        if self._with_parts:
            rewards = Rewards(rewards, {"a": first, "b": second})
        return Rollout(problems=problems, generated=generated, rewards=rewards)


def run(kinds, *, num_groups, max_rounds, each_reward=False, with_parts=False):
    source = Source(kinds, with_parts=with_parts)
    rollout, measured = resample(
        source,
        num_groups=num_groups,
        group_size=2,
        max_rounds=max_rounds,
        each_reward=each_reward,
        pad_id=PAD,
    )
    rows = rollout.generated["output_ids"][:, :2].tolist()
    # Rewards, problems and completions belong together, and groups are complete and adjacent.
    assert [problem.prompt for problem in rollout.problems] == [f"problem {n}" for n, _ in rows]
    assert [index for _, index in rows] == [0, 1] * num_groups
    assert len(rollout.rewards) == 2 * num_groups
    return source, rollout, [number for number, _ in rows[::2]], measured


def test_groups_without_a_signal_are_replaced_until_there_are_enough():
    source, rollout, numbers, measured = run("+--+-++", num_groups=4, max_rounds=5)
    assert source.requests == [4, 2, 1]
    assert numbers == [0, 3, 5, 6]
    assert rollout.rewards == [0.0, 1.0] * 4
    assert measured == {
        "dynamic_rounds": 2,
        "dynamic_dropped_groups": 3,
        "dynamic_unfilled_groups": 0,
        "dynamic_reward_mean": pytest.approx((4 * 1 + 3 * 2) / 14),
    }
    # Rows of an earlier, narrower round are padded.
    assert rollout.generated["output_ids"].shape == (8, 5)
    assert rollout.generated["output_ids"][0].tolist() == [0, 0, 1, PAD, PAD]
    assert rollout.generated["weight_versions"][0].tolist() == [5] * 3 + [NOT_SAMPLED] * 2
    assert rollout.generated["unpadded_sequence_lengths"].tolist() == [3] * 4 + [4] * 2 + [5] * 2


def test_after_the_last_round_the_step_is_filled_with_what_is_there():
    source, rollout, numbers, measured = run("+--+--+-", num_groups=4, max_rounds=2)
    assert source.requests == [4, 2, 2]
    assert numbers == [0, 3, 6, 7]
    assert rollout.rewards == [0.0, 1.0] * 3 + [1.0, 1.0]
    assert (measured["dynamic_dropped_groups"], measured["dynamic_unfilled_groups"]) == (4, 1)


def test_a_step_without_any_signal_is_bounded():
    source, rollout, numbers, measured = run("-" * 12, num_groups=3, max_rounds=3)
    assert source.requests == [3, 3, 3, 3]
    assert numbers == [9, 10, 11]
    assert rollout.rewards == [1.0] * 6
    assert (measured["dynamic_rounds"], measured["dynamic_unfilled_groups"]) == (3, 3)
    assert measured["dynamic_dropped_groups"] == 9


def test_one_round_is_enough_where_all_have_a_signal():
    source, _, numbers, measured = run("++", num_groups=2, max_rounds=3)
    assert (source.requests, numbers) == ([2], [0, 1])
    assert (measured["dynamic_rounds"], measured["dynamic_dropped_groups"]) == (0, 0)


@pytest.mark.parametrize(("each_reward", "numbers"), [(True, [0, 1]), (False, [0, 2])])
def test_unequal_parts_of_equal_rewards_are_a_signal_where_each_counts(each_reward, numbers):
    _, rollout, found, _ = run(
        "+x+", num_groups=2, max_rounds=1, each_reward=each_reward, with_parts=True
    )
    assert found == numbers
    assert isinstance(rollout.rewards, Rewards)
    assert {name: len(values) for name, values in rollout.rewards.parts.items()} == {"a": 4, "b": 4}
    assert rollout.rewards.parts["b"] == ([0.0, 0.0, 1.0, 0.0] if each_reward else [0.0] * 4)
