"""What a population is trained on: prompts, the facts to check completions by, and rewards.

task         EvolutionTask and Prompt, training and held-out splits;  GeneratedTask  draws its prompts
jsonl        FileTask: a prompt per line of a file
prompt_file  prompts and any columns of a file, with rewards of the user's
find_task    the task behind a name, a class or a file
arithmetic, countdown, digit_copy    generated tasks
gsm8k, translation                   tasks of files
"""

from __future__ import annotations

from flatout.engines.evolution.tasks.find_task import find_task
from flatout.engines.evolution.tasks.jsonl import FileTask
from flatout.engines.evolution.tasks.task import EvolutionTask, GeneratedTask, Prompt, Split, text_of_ids

__all__ = ["FileTask", "GeneratedTask", "Prompt", "Split", "EvolutionTask", "find_task", "text_of_ids"]
