"""Lines of the user's code, and what each does.

array_lists      tensors that are made from lists of NumPy arrays
call_sites       tensor creations, row accesses, waits for the GPU, copies, recurrent cells
attention_calls  attention that is written out
counted_calls    checkpoints, cache and wait calls, modules inside the model
module_calls     outermost model calls: how many a step makes, with how many rows each
stacks           the lines the training thread is found in, by looking at its stack
lookout          where that thread is over the whole run, some twenty times a second
live_memory      lines that make tensors which stay alive, step after step
retained         who keeps a tensor alive, and how much of an autograd graph hangs on it
stores           the line that puts a value into a name
function_modes   a torch-function mode put onto the running thread from inside a hook
live_objects     the garbage collector's objects, walked without harming other threads
"""
