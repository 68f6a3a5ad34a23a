"""A short real run on a GPU: what a trace cannot know.

run_probe      steps the job at two small batches in a child process
probe_results  what was measured, and how it corrects an estimate
cuda_context   the size of the CUDA context, from the driver's figures
"""
