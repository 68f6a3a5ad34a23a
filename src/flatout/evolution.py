"""Evolution strategies: the names that a program of your own needs.

    from flatout.evolution import Eggroll

Eggroll                        ask for members' outputs, tell their rewards: any module, any fitness
PromptFile                     a task of your own: prompts and any columns of a .jsonl file, and rewards
GeneratedTask, FileTask, Prompt    what a task class is made of;  EvolutionTask  what a task has to have
Reward, ExactMatch, NumericAnswer, FormatMatch, WeightedRewards    what a completion is worth

`flatout.evolve` runs settings, as `flatout evolve` does.  Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatout.ground.lazy_names import lazy_names as _lazy_names

if TYPE_CHECKING:
    from flatout.engines.evolution.eggroll import Eggroll as Eggroll
    from flatout.engines.evolution.rewards.kinds import ExactMatch as ExactMatch
    from flatout.engines.evolution.rewards.kinds import FormatMatch as FormatMatch
    from flatout.engines.evolution.rewards.kinds import NumericAnswer as NumericAnswer
    from flatout.engines.evolution.rewards.kinds import Reward as Reward
    from flatout.engines.evolution.rewards.make_reward import WeightedRewards as WeightedRewards
    from flatout.engines.evolution.tasks.jsonl import FileTask as FileTask
    from flatout.engines.evolution.tasks.prompt_file import PromptFile as PromptFile
    from flatout.engines.evolution.tasks.task import EvolutionTask as EvolutionTask
    from flatout.engines.evolution.tasks.task import GeneratedTask as GeneratedTask
    from flatout.engines.evolution.tasks.task import Prompt as Prompt
else:
    __all__, __getattr__, __dir__ = _lazy_names(__name__)
