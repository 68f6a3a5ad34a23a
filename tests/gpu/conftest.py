"""What tests on a GPU share: order, and a GPU that each file leaves as it found it."""

from __future__ import annotations

import gc

import pytest

# These compare figures of the whole GPU before and after their own work.  They run first, while no other test
# has left memory in torch's cache, a CUDA graph, or a process that is still giving its memory back.
ALONE = ("test_nvml_on_gpu.py", "test_monitor_on_gpu.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in ALONE)  # stable: all else keeps its order


@pytest.fixture(scope="module", autouse=True)
def _empty_gpu() -> None:
    """Collect what the file before left: models and graphs that refer to themselves, and cached memory."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
