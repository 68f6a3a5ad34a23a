"""The contract of a GPU's datasheet, as a test class.

    from flatout.testing.datasheets import DatasheetContract
    from my_package.gpus import GPUS

    class TestGpus(DatasheetContract):
        def make_rows(self):
            return GPUS

pytest then holds every row to what plans and diagnoses rely on: the figures are complete, dense, and fit
together.
"""

from __future__ import annotations

from collections.abc import Sequence

from flatout.hardware.datasheet import DTYPES, Datasheet
from flatout.hardware.matching import plain_name

TOLERANCE = 0.03


class DatasheetContract:
    """Subclass it, and make the rows."""

    def make_rows(self) -> Sequence[Datasheet]:
        """Make the rows under test."""
        raise NotImplementedError

    def test_no_name_or_alias_is_given_twice(self) -> None:
        names = [plain_name(name) for row in self.make_rows() for name in (row.name, *row.aliases)]
        assert names
        assert len(set(names)) == len(names)

    def test_a_row_is_complete(self) -> None:
        for row in self.make_rows():
            assert row.source.startswith(row.vendor), row.name
            assert row.driver_names, row.name
            assert {"fp32", "fp64"} <= set(row.peak_flops) <= set(DTYPES), row.name
            assert all(rate > 0 for rate in row.peak_flops.values()), row.name
            assert row.bandwidth_bytes_per_s > 0, row.name
            assert (row.vendor == "NVIDIA") == (row.compute_capability is not None), row.name
            assert row.multiprocessors is None or row.multiprocessors > 0, row.name

    def test_drivers_report_at_least_the_decimal_size_and_at_most_the_binary_one(self) -> None:
        for row in self.make_rows():
            assert row.sold_gb * 10**9 <= row.memory_bytes <= row.sold_gb * 2**30, row.name

    def test_peaks_are_dense(self) -> None:
        """Refuse rates with sparsity: they are twice what the other dtypes of the chip allow."""
        for row in self.make_rows():
            peaks = row.peak_flops
            for over, under, times in (("fp16", "bf16", 1), ("fp16", "tf32", 2), ("fp8", "fp16", 2)):
                if over in peaks and under in peaks:
                    assert abs(peaks[over] / peaks[under] / times - 1) <= TOLERANCE, (row.name, over, under)
