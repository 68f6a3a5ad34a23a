"""Batches reach the model sooner: workers, prefetching, page-locked memory, copies."""
