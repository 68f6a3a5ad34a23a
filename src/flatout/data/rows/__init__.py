"""How rows of samples become tensors: padded, gathered, stored.

padding        how one ragged field is padded, and with which rows
pad_rows       arrays or tensors of a field as one padded tensor, in one pass over the bytes
buffers        memory that batches are written into, and copies to a device
row_gather     records of flat arrays gathered many at once, on the host or on a device
ragged_files   ragged records on disk
pieces         pieces of sequences, and the one gather that joins them
"""
