"""What every engine's run needs: one floor under evolution, adapters and steering.

settings      a table of keys: read, checked, saved, compared with those of a run that resumes
folder        where a run happens and how it is recorded; Outcome; OnProgress
checkpoints   tensors and state of a step, whole or not there
fingerprint   names for weights, models and tokenizers
meeting       the processes of a job agree on a folder, before they compute together
ranks         this process among those of a launcher, and its device
log           log.jsonl and TensorBoard curves of a run
json_lines    files with one JSON object per line
tensor_files  safetensors files, read and written
models        a model and its tokenizer from a folder or the Hub, in a dtype that fits the device
fetch_model   a small real model in a folder, from a package or the Hub

Interrupts, the launcher's variables (`torchrun`) and the home of all runs (`runs`) lie in `flatout.ground`,
where other rooms use them too.
"""
