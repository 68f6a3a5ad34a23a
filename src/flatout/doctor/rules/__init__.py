"""One rule per file; the first digit of its code says where the time goes.

1   loading: single_process_loading, respawned_workers, concatenating_collate, unbucketed_padding
2   transfers, waits and the time between phases: unpinned_host_memory, sync_in_step, costly_block
3   Python loops: tensor_created_in_loop, row_indexing_in_loop, recurrent_cell_loop, batch_of_one_forwards
4   arithmetic: no_mixed_precision
5   memory: graph_retained_across_steps
8   outside the step: evaluation_dominates, blocking_checkpoint, epoch_start_stall, rollout_dominates,
    stall_between_steps
"""
