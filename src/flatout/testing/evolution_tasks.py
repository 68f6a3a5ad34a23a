"""The contract of an evolution task, as a test class.

    from flatout.testing.evolution_tasks import EvolutionTaskContract
    from my_package.rhymes import Rhymes

    class TestRhymes(EvolutionTaskContract):
        def make_task(self, folder):
            return Rhymes(length=4)

pytest then holds the task to what the engine relies on: prompts are a function of their arguments, what is
held out is never trained on, and the reward scores any text.
"""

from __future__ import annotations

import math
import pickle
from pathlib import Path

from flatout.engines.evolution.rewards.kinds import is_cheap
from flatout.engines.evolution.tasks.task import EvolutionTask, Split

COUNT = 40
ODD_TEXTS = ("", " \n", "42", "####", "<answer>", "\\boxed{", "(" * 300, "\u00e4\u00f6\u2212\u2028\0", "1/0")


class EvolutionTaskContract:
    """Subclass it, and make the task; `folder` is empty and the test's own."""

    def make_task(self, folder: Path) -> EvolutionTask:
        """Make the task under test."""
        raise NotImplementedError

    def test_prompts_are_a_function_of_their_arguments(self, tmp_path: Path) -> None:
        made, again = self.make_task(tmp_path), self.make_task(tmp_path)
        splits: tuple[Split, ...] = ("train", "heldout")
        for split in splits:
            first = made.prompts(split, epoch=3, count=COUNT, seed=1)
            assert first == made.prompts(split, epoch=3, count=COUNT, seed=1)
            assert first == again.prompts(split, epoch=3, count=COUNT, seed=1)

    def test_training_prompts_are_others_in_another_epoch_and_with_another_seed(self, tmp_path: Path) -> None:
        made = self.make_task(tmp_path)
        assert keys(made, "train", epoch=0) != keys(made, "train", epoch=1)
        assert keys(made, "train", seed=0) != keys(made, "train", seed=1)
        assert len(keys(made, "train")) == COUNT

    def test_held_out_prompts_stay_the_same_and_never_repeat(self, tmp_path: Path) -> None:
        made = self.make_task(tmp_path)
        held_out = keys(made, "heldout", epoch=0)
        assert held_out == keys(made, "heldout", epoch=7)
        assert held_out
        assert len(set(held_out)) == len(held_out)

    def test_nothing_held_out_is_trained_on(self, tmp_path: Path) -> None:
        made = self.make_task(tmp_path)
        trained = {
            key
            for seed in range(3)
            for epoch in range(20)
            for key in keys(made, "train", epoch=epoch, seed=seed)
        }
        held_out = {key for seed in range(3) for key in keys(made, "heldout", seed=seed)}
        assert len(trained) > 20
        assert not trained & held_out

    def test_the_reward_is_a_finite_number_for_any_text(self, tmp_path: Path) -> None:
        made = self.make_task(tmp_path)
        for prompt in made.prompts("train", epoch=0, count=3, seed=0):
            for text in ODD_TEXTS:
                score = made.reward(text, prompt.answer)
                assert score is not None and math.isfinite(score), (text, prompt)

    def test_a_reward_that_is_not_cheap_travels_to_another_process(self, tmp_path: Path) -> None:
        made = self.make_task(tmp_path)
        if not is_cheap(made.reward):
            assert pickle.loads(pickle.dumps(made.reward)) == made.reward  # noqa: S301  as a pipe does it

    def test_a_completion_has_an_end(self, tmp_path: Path) -> None:
        made = self.make_task(tmp_path)
        assert made.max_new_tokens > 0
        assert isinstance(made.stop, tuple)
        assert all(made.stop), "an empty text would end every completion at once"
        assert made.name


def keys(task: EvolutionTask, split: Split, *, epoch: int = 0, seed: int = 0) -> list[str]:
    """Return the keys of some prompts of a task."""
    return [prompt.key for prompt in task.prompts(split, epoch=epoch, count=COUNT, seed=seed)]
