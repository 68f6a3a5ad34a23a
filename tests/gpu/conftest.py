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
DOOR, GPU = (Path(tempfile.gettempdir()) / f"flatout-gpu-tests-{name}.lock" for name in ("door", "gpu"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in ALONE)  # stable: all else keeps its order


@pytest.fixture(scope="module", autouse=True)
def _share_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep the GPU to the files of ALONE while they run, also where pytest runs several processes.

    One of these closes the door first: else others would take turns with the GPU for ever.
    """
    is_alone = request.path.name in ALONE
    with DOOR.open("w") as door, GPU.open("w") as gpu:
        fcntl.flock(door, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
        fcntl.flock(gpu, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
        if not is_alone:
            fcntl.flock(door, fcntl.LOCK_UN)
        yield


@pytest.fixture(scope="module", autouse=True)
def _empty_gpu() -> None:
    """Collect what the file before left: models and graphs that refer to themselves, and cached memory."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
