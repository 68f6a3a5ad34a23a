"""What every engine's run needs: one floor under evolution, adapters and steering.

settings      a table of keys: read, checked, saved, compared when a run resumes
folder        where a run writes and how it is recorded; Outcome; OnProgress
checkpoints   tensors and state of a step, complete or absent
fingerprint   names for weights, models and tokenizers
meeting       how the processes of a job find each other and agree on a folder
ranks         this process among the processes of a job, and its device
log           log.jsonl and TensorBoard curves of a run
row_files     files of rows: JSON objects, or a table with named columns
tensor_files  safetensors files, read and written
models        a model and its tokenizer from a folder or the Hub, in a dtype that fits the device
fetch_model   a small real model in a folder, from a package or the Hub

Interrupts, the launcher's variables (`torchrun`) and the home of all runs (`runs`) lie in `flatout.ground`,
where other rooms use them too.
"""
