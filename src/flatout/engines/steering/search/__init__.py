"""Which layer, method, strength and place.

run_search      a search from its settings to a record: the first worker, the others, and the end
halved_search   brackets of trials that share batches and are halved over the questions
halving         who goes on at each rung
space           what a trial chooses from
study           Optuna's study: storage, brackets, and what makes it the same study
finished_rows   every answered (trial, question), kept as it finishes
test_winner     the winner on fresh questions and neutral texts
retest          paired intervals, and what steering breaks
neutral_texts   texts that a steered model should still find likely
"""
