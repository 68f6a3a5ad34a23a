"""The contract holds a good row and catches the usual mistakes; a package adds a GPU without editing ours."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flatout.hardware.datasheet import Datasheet, make_datasheet
from flatout.hardware.matching import GROUP
from flatout.testing.datasheets import DatasheetContract

GPU = make_datasheet(
    "X1000",
    "Hopper",
    "9.0",
    48,
    None,
    3000,
    fp64=30,
    fp32=60,
    tf32=400,
    bf16=800,
    fp16=800,
    fp8=1600,
    drivers=("NVIDIA X1000",),
    source="NVIDIA X1000 data sheet",
)
PACKAGE = """
from flatout.hardware.datasheet import make_datasheet
GPU = make_datasheet("X1000", "Hopper", "9.0", 48, None, 3000, fp64=30, fp32=60,
                     multiprocessors=144, drivers=("NVIDIA X1000",), source="NVIDIA X1000 data sheet")
"""


class TestGpus(DatasheetContract):
    def make_rows(self) -> tuple[Datasheet, ...]:
        return (GPU,)


@pytest.mark.parametrize(
    ("wrong", "caught_by"),
    [
        ({"peak_flops": {**GPU.peak_flops, "bf16": 1600e12}}, "test_peaks_are_dense"),
        ({"peak_flops": {"fp32": 1.0}}, "test_a_row_is_complete"),
        ({"source": "a web page"}, "test_a_row_is_complete"),
        (
            {"reported_mib": 40_000},
            "test_drivers_report_at_least_the_decimal_size_and_at_most_the_binary_one",
        ),
        ({"aliases": ("x1000",)}, "test_no_name_or_alias_is_given_twice"),
    ],
)
def test_a_mistake_is_caught(wrong: dict[str, Any], caught_by: str) -> None:
    class Wrong(DatasheetContract):
        def make_rows(self) -> tuple[Datasheet, ...]:
            return (replace(GPU, **wrong),)

    with pytest.raises(AssertionError):
        getattr(Wrong(), caught_by)()


def test_a_package_adds_a_gpu_by_its_entry_point(tmp_path: Path) -> None:
    (tmp_path / "more_gpus.py").write_text(PACKAGE)
    metadata = tmp_path / "more_gpus-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: more-gpus\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\nx1000 = more_gpus:GPU\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from flatout.hardware.device import device_of_driver\n"
        "from flatout.hardware.simulated import simulated_device\n"
        "from flatout.memory.trace.make_trace import multiprocessors_of\n"
        "print(simulated_device('x1000').memory_bytes,"
        " device_of_driver('NVIDIA X1000', memory_bytes=48 * 10**9).peak_flops['fp32'],"
        " multiprocessors_of(simulated_device('x1000')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "48000000000 60000000000000.0 144\n", done.stderr
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\nx1000 = more_gpus:MISSING\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"more-gpus adds 'x1000' to {GROUP}, and more_gpus:MISSING cannot be loaded" in done.stderr
