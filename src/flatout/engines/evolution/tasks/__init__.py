"""What a population is trained on: prompts, the facts to check completions by, and rewards.

Task          where prompts come from and what completions are worth
Prompt        one question, as text or token numbers
task_named    the task behind a name or a file
text_of_ids   how a completion without a tokenizer is shown to a reward
"""

from __future__ import annotations

from flatout.engines.evolution.tasks.find_task import task_named
from flatout.engines.evolution.tasks.task import Prompt, Split, Task, text_of_ids

__all__ = ["Prompt", "Split", "Task", "task_named", "text_of_ids"]
