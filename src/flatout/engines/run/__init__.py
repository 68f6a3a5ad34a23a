"""What every engine's run needs.

settings      keys of a YAML file, checked against the settings of a verb
models        a model from a folder, quietly and whole
fingerprint   names for weights and tokenizers
ranks         this process among those of torchrun
log           log.jsonl and TensorBoard curves of a run
"""
