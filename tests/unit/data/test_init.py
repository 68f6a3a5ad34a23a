from __future__ import annotations

import flatout.data


def test_the_blocks_are_there_and_nothing_else() -> None:
    assert set(flatout.data.__all__) == {
        "DeviceDataset",
        "Pad",
        "PadCollate",
        "Padded",
        "RaggedArrays",
        "RowBatches",
        "TokenBudgetBatches",
        "choose_workers",
        "prefetch",
        "ragged",
    }
    for name in flatout.data.__all__:
        assert getattr(flatout.data, name).__doc__, name
