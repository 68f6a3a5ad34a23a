"""What a loop over samples appends; `test_one_gather` runs what the pieces make."""

from __future__ import annotations

from flatout.tuner.patches.ragged_pieces import RaggedPiece


def test_a_piece_names_the_samples_and_rows_it_has() -> None:
    assert RaggedPiece(kind="constant", value="start").code("for b in x") == "ragged.constant(start),"
    rows = RaggedPiece(kind="rows", value="x", lengths="n[b]", start="1", where=("keep[b]",))
    lengths, start = "[n[b] if keep[b] else 0 for b in x]", "start=[int(1) for b in x]"
    assert rows.code("for b in x") == f"ragged.rows(\n    x,\n    {lengths},\n    {start},\n),"
    each = RaggedPiece(kind="each", value="x", where=("a[b]", "c[b]"))
    assert "where=[bool((a[b]) and (c[b])) for b in x]," in each.code("for b in x")
