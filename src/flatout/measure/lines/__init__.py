"""What each line of the user's code does.

array_lists      tensors made from lists of NumPy arrays
call_sites       tensor creations, row accesses, waits for the GPU, copies, recurrent cells
attention_calls  handwritten attention
counted_calls    checkpoints, cache and wait calls, modules inside the model
module_calls     outermost model calls: how many per step, with how many rows each
stacks           the lines that stack samples of the training thread find
stack_watch      where that thread is over the whole run, some twenty times a second
live_memory      lines that make tensors which stay alive, step after step
holders          who keeps a tensor alive, and how much of an autograd graph it holds
storing_lines    the line that stores a value under a name
function_modes   install a torch-function mode on the running thread from inside a hook
live_objects     walk the garbage collector's objects without harming other threads
"""
