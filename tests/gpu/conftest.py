"""What tests on a GPU share: order, and a GPU that each file leaves as it found it."""

from __future__ import annotations

import fcntl
import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# These compare figures of the whole GPU before and after their own work.  They run first, while no other test
# has left memory in torch's cache, a CUDA graph, or a process that is still giving its memory back.
ALONE = ("test_nvml_on_gpu.py", "test_monitor_on_gpu.py")
LOCK = Path(tempfile.gettempdir()) / "flatout-gpu-tests.lock"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in ALONE)  # stable: all else keeps its order


@pytest.fixture(scope="module", autouse=True)
def _share_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep the GPU to the files of ALONE while they run, also where pytest runs several processes."""
    with LOCK.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if request.path.name in ALONE else fcntl.LOCK_SH)
        yield


@pytest.fixture(scope="module", autouse=True)
def _empty_gpu() -> None:
    """Collect what the file before left: models and graphs that refer to themselves, and cached memory."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
