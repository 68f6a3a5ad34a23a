"""Which layer, method, strength and place.

run_search      a search from its settings to a record: the first worker, the others, and the end
search_worker   one process of it: its replica of the model, its engine, its study
halved_search   brackets of trials that share batches and are halved over the questions
halving         who goes on at each rung
space           what a trial chooses from
study           Optuna's study: brackets, and what makes it the same study
storage         the journal file or database behind it
finished_rows   every answered (trial, question), kept as it finishes
test_winner     the winner on fresh questions and neutral texts, with paired intervals
"""
