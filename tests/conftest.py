"""What every test stands on: no network, no deadlines, and GPU tests only where there is a GPU."""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# A framework under test must fail at once, not wait for a hub it cannot reach.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Without a GPU, Triton's kernels run in its interpreter.  Triton reads this once, when it is first imported.
if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/dxg").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A deadline is an absolute time, and a shared machine has none to promise.  `make test` tries the same
# examples every time, so that it fails for a change and not for a seed, and few of them; `make fuzz` tries
# many others, and what it finds becomes an `@example` of its test.
hypothesis.settings.register_profile(
    "same", deadline=None, max_examples=30, derandomize=True, database=None, print_blob=True
)
hypothesis.settings.register_profile(
    "fuzz",
    deadline=None,
    max_examples=500,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("fuzz" if os.environ.get("FLATOUT_FUZZ") else "same")


@pytest.fixture(autouse=True, scope="module")
def nothing_is_compiled_yet() -> None:
    """A job in which something was compiled is watched otherwise: each file begins as a job does."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None:
        dynamo.counters.clear()


# Collecting the tests makes a million objects that stay: looking for garbage takes a third of its time.
gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> None:
    """Collections and scans pass over what all files have loaded: a million objects, a second each time.

    A test that looks for functions of its own file calls `gc.unfreeze`.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # what is frozen at the end is not taken down, and some libraries complain


@functools.cache
def _why_no_gpu() -> str | None:
    import torch

    if torch.cuda.is_available():
        return None
    return "needs a CUDA GPU; torch sees none here"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and (reason := _why_no_gpu()):
        pytest.skip(reason)


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Traces of tests are not the user's; commands that a test starts inherit the folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLATOUT_CACHE", str(tmp_path_factory.mktemp("flatout-cache")))
        yield


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session", autouse=True)
def signals_of_a_terminal() -> Iterator[None]:
    """Handle signals as in a terminal, also under nohup and in the background, where a shell ignores them.

    Programs that a test starts inherit what is ignored, and never hear the signals that it sends them.
    """
    usual = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGHUP: signal.SIG_DFL,
        signal.SIGQUIT: signal.SIG_DFL,
        signal.SIGTERM: signal.SIG_DFL,
    }
    ignored = [number for number in usual if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, usual[number])
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(autouse=True, scope="module")
def usual_turns_of_threads() -> None:
    """Threads take turns as in a fresh process, whatever a file before this one left."""
    sys.setswitchinterval(0.005)
