"""Batches reach the model sooner: workers, what they fetch ahead, page-locked memory, copies."""
