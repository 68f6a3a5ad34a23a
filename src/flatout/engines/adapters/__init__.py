"""Adapters: several tasks on one frozen encoder, a low-rank adapter and a head each, and a router.

verbs         train, evaluate, predict, export, status: what `flatout adapt` does
settings      the settings of a run
fill_settings settings that a first adapter or the rows of a task decide
assembly      the loaded encoder, adapters, heads, decoder and router of one run
run_folder    how far the run in a folder is
peft_format   adapters as folders of PEFT: read and written
export_run    a run as files that need no Flatout
lora          the adapters' products, the encoder that packs all tasks into one pass, the optimizer step
tasks         rows, head, loss and scores of each task
training      the three phases
routing       the router and what it sees
evaluation    scores under every routing, and answers
report        the page and the picture of a run
"""
