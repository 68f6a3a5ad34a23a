"""What a population is trained on: prompts, the facts to check completions by, and rewards.

task         EvolutionTask and Prompt, training and held-out splits; GeneratedTask draws its prompts
jsonl        FileTask: a prompt per line of a file
prompt_file  prompts and any columns of a file, with rewards of the user's
find_task    the task behind a name, a class or a file
arithmetic, countdown, digit_copy    generated tasks
gsm8k, translation                   tasks of files
"""
