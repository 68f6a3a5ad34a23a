from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.ground.errors import BadInput
from flatout.planner.config.backups import (
    BACKUPS,
    FileEdit,
    apply_edits,
    check_places,
    check_writable,
    last_backup,
    plan_edits,
    sha256,
    show_edits,
    undo,
    write_file,
    write_together,
)
from flatout.planner.config.config_text import Value, means
from flatout.planner.config.job_config import read_config
from tests.support.planner import contents, write_curriculum

NOON = datetime(2030, 1, 31, 12, tzinfo=UTC)


def edits_of(conf: Path, changes: Mapping[str, Value]) -> tuple[FileEdit, ...]:
    """Edits by dotted key; a key of a stage is changed in every stage that has it."""
    config = read_config(conf)
    places = {
        found.place: value
        for stage in config.stages
        for key, value in changes.items()
        if (found := stage.find(key)) is not None and found.place is not None
    }
    return plan_edits(config, places)


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    return write_curriculum(tmp_path)


def test_apply_and_undo_over_several_files(conf: Path) -> None:
    before = contents(conf)
    edits = edits_of(conf, {"data_loader.batch_size": 32, "n_negatives": 5})
    backup = apply_edits(edits, root=conf, now=NOON)
    assert backup is not None
    assert backup.folder == conf / BACKUPS / "20300131T120000.000000Z"
    assert [saved.path for saved in backup.files] == [
        "config.yaml",
        "curriculum/01_stage.yaml",
        "curriculum/02_stage.yaml",
    ]
    after = contents(conf)
    assert after["config.yaml"] == before["config.yaml"].replace(b"batch_size: 4 ", b"batch_size: 32 ")
    assert after["curriculum/02_stage.yaml"] == b"n_positives: 16\r\nn_negatives: 5\r\n"
    manifest = json.loads((backup.folder / "manifest.json").read_text())
    assert (manifest["format"], manifest["version"]) == ("flatout-backup", 1)
    for saved in manifest["files"]:
        assert saved["sha256_before"] == sha256(before[saved["path"]])
        assert saved["sha256_after"] == sha256(after[saved["path"]])
        assert (backup.folder / saved["copy"]).read_bytes() == before[saved["path"]]
    assert undo(conf) == backup
    assert contents(conf) == before


def test_undo_goes_back_one_step_at_a_time(conf: Path) -> None:
    states = [contents(conf)]
    for value in (8, 16):
        apply_edits(edits_of(conf, {"data_loader.batch_size": value}), root=conf, now=NOON)
        states.append(contents(conf))
    for expected in (states[1], states[0]):
        undo(conf)
        assert contents(conf) == expected
    with pytest.raises(BadInput, match="nothing to undo"):
        undo(conf)


def test_two_backups_of_one_moment_are_kept_apart(conf: Path) -> None:
    folders = []
    for value in (8, 16, 32):
        backup = apply_edits(edits_of(conf, {"data_loader.batch_size": value}), root=conf, now=NOON)
        assert backup is not None
        folders.append(backup.folder)
    assert len(set(folders)) == 3
    assert last_backup(conf).folder == folders[-1]


def test_nothing_to_change_writes_nothing(conf: Path) -> None:
    edits = edits_of(conf, {"data_loader.batch_size": 4})
    assert edits == ()
    assert apply_edits(edits, root=conf) is None
    assert not (conf / ".flatout").exists()


def test_a_file_that_changed_since_is_not_undone_unless_forced(conf: Path) -> None:
    before = contents(conf)
    apply_edits(edits_of(conf, {"data_loader.batch_size": 32, "n_negatives": 5}), root=conf)
    own = conf / "curriculum" / "01_stage.yaml"
    own.write_bytes(own.read_bytes() + b"# mine\n")
    changed = contents(conf)
    with pytest.raises(BadInput, match=r"curriculum/01_stage.yaml was changed since .*--force"):
        undo(conf)
    assert contents(conf) == changed
    backup = undo(conf, force=True)
    assert contents(conf) == before
    (kept,) = (backup.folder / "overwritten").iterdir()
    assert kept.read_bytes() == changed["curriculum/01_stage.yaml"]


def test_a_file_that_is_gone_is_restored_by_force(conf: Path) -> None:
    before = contents(conf)
    apply_edits(edits_of(conf, {"data_loader.batch_size": 32}), root=conf)
    (conf / "config.yaml").unlink()
    with pytest.raises(BadInput, match=r"config.yaml is gone"):
        undo(conf)
    undo(conf, force=True)
    assert contents(conf) == before


def test_an_apply_that_was_cut_off_between_two_files_is_undone(conf: Path) -> None:
    before = contents(conf)
    apply_edits(edits_of(conf, {"data_loader.batch_size": 32, "n_negatives": 5}), root=conf)
    (conf / "config.yaml").write_bytes(before["config.yaml"])  # as if it had not been reached
    undo(conf)
    assert contents(conf) == before


def test_a_damaged_backup_is_not_put_back(conf: Path) -> None:
    backup = apply_edits(edits_of(conf, {"data_loader.batch_size": 32}), root=conf)
    assert backup is not None
    after = contents(conf)
    copy = backup.folder / backup.files[0].copy
    copy.write_bytes(b"something else")
    with pytest.raises(BadInput, match="is damaged: its checksum"):
        undo(conf)
    copy.unlink()
    with pytest.raises(BadInput, match="cannot be read"):
        undo(conf)
    for text, words in (
        ("[]", "is not the manifest"),
        ("{", "cannot be read"),
        ('{"format": "flatout-backup", "version": 1, "files": [{}]}', "path is missing"),
    ):
        (backup.folder / "manifest.json").write_text(text)
        with pytest.raises(BadInput, match=words):
            undo(conf)
    assert contents(conf) == after


def test_a_read_only_file_stops_all(conf: Path) -> None:
    before = contents(conf)
    edits = edits_of(conf, {"data_loader.batch_size": 32, "n_negatives": 5})
    (conf / "curriculum" / "02_stage.yaml").chmod(0o444)
    with pytest.raises(BadInput, match=r"02_stage.yaml is read-only"):
        apply_edits(edits, root=conf)
    assert contents(conf) == before
    assert not (conf / ".flatout").exists()


def test_a_symbolic_link_is_not_followed(conf: Path, tmp_path: Path) -> None:
    real = tmp_path / "elsewhere.yaml"
    (conf / "config.yaml").rename(real)
    (conf / "config.yaml").symlink_to(real)
    before = real.read_bytes()
    with pytest.raises(BadInput, match="is a symbolic link to"):
        apply_edits(edits_of(conf, {"data_loader.batch_size": 32}), root=conf)
    assert real.read_bytes() == before
    assert (conf / "config.yaml").is_symlink()


def test_a_file_that_changes_while_a_plan_is_made_is_left_alone(conf: Path) -> None:
    edits = edits_of(conf, {"data_loader.batch_size": 32})
    (conf / "config.yaml").write_text("mine: 1\n")
    with pytest.raises(BadInput, match="was changed while the plan was made"):
        apply_edits(edits, root=conf)
    assert (conf / "config.yaml").read_text() == "mine: 1\n"


def test_no_place_for_a_backup_means_no_change(conf: Path) -> None:
    before = contents(conf)
    (conf / ".flatout").write_text("a file where the folder should be")
    with pytest.raises(BadInput, match="cannot make a backup"):
        apply_edits(edits_of(conf, {"data_loader.batch_size": 32}), root=conf)
    (conf / ".flatout").unlink()
    assert contents(conf) == before


def test_a_write_that_fails_leaves_no_backup_to_undo(conf: Path) -> None:
    """The second file's folder vanishes after the check: its temporary cannot be made."""
    first, *_ = edits_of(conf, {"data_loader.batch_size": 32})
    before = contents(conf)
    long_name = conf / ("x" * 250)  # a name that is allowed, and whose temporary is not
    long_name.write_bytes(b"a: 1\n")
    with pytest.raises(BadInput, match=r"could not write .*no file was changed"):
        apply_edits([first, FileEdit(path=long_name, before=b"a: 1\n", after=b"a: 2\n")], root=conf)
    assert long_name.read_bytes() == b"a: 1\n"
    long_name.unlink()
    assert contents(conf) == before
    with pytest.raises(BadInput, match="nothing to undo"):
        undo(conf)


def test_the_diff(conf: Path) -> None:
    edits = edits_of(conf, {"training.trainer.max_epochs": 3, "n_negatives": 5})
    diff = show_edits(edits, root=conf)
    assert diff.startswith("--- a/config.yaml\n+++ b/config.yaml\n@@ ")
    unended = "\n\\ No newline at end of file\n"
    assert f"-    max_epochs: 10{unended}+    max_epochs: 3{unended}" in diff
    assert "-n_negatives: 8\r\n+n_negatives: 5\r\n" in diff
    assert show_edits((), root=conf) == ""


pieces = st.sampled_from(
    [
        "# c\n",
        "\n",
        "a: 1 # x\r\n",
        "'b': \"2\"\n",
        "c: {d: 3, e: [4]}\n",
        "f: 2e-4\n",
        "a: 9\n",
        "g: é\u2028\n",
    ]
)


@settings(max_examples=40)  # each writes to the disk and waits for it
@given(
    st.lists(pieces, min_size=1),
    st.sampled_from(["", "end: 5", "end: 5\n"]),
    st.integers(0, 10**6),
    st.data(),
)
def test_apply_then_undo_is_nothing_at_all(
    lines: list[str], end: str, value: int, data: st.DataObject
) -> None:
    text = "first: 0\n" + "".join(lines) + end
    with TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_bytes(text.encode())
        (stage,) = read_config(path).stages
        key = data.draw(st.sampled_from(sorted(stage.values)))
        edits = edits_of(path, {key: value})
        backup = apply_edits(edits, root=Path(folder))
        changed = not means(stage.values[key].value, value)
        assert (backup is not None) or not changed
        if backup is not None:
            assert path.read_bytes() != text.encode()
            undo(Path(folder))
        assert path.read_bytes() == text.encode()


def test_several_configs_of_one_folder_are_undone_apart(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.yaml", "b.yaml")]
    for path in paths:
        path.write_text("x: 1\n")
        apply_edits(edits_of(path, {"x": 2}), root=tmp_path, config=path)
    assert undo(tmp_path, config=paths[0]).config == "a.yaml"
    assert [path.read_text() for path in paths] == ["x: 1\n", "x: 2\n"]
    with pytest.raises(BadInput, match=r"holds no backup of a\.yaml"):
        undo(tmp_path, config=paths[0])
    assert undo(tmp_path).config == "b.yaml"


def test_places_that_cannot_be_written_are_known_beforehand(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("a: &a 1\nb: *a\nc: |\n  1\n")
    config = read_config(path)
    places = {key: found.place for key, found in config.stages[0].values.items() if found.place is not None}
    check_places(config, [places["a"]])
    for key, words in (("b", "is an alias"), ("c", "is a block scalar")):
        with pytest.raises(BadInput, match=words):
            check_places(config, places.values() if key == "b" else [places[key]])
    path.chmod(0o444)
    with pytest.raises(BadInput, match="is read-only"):
        check_places(config, [places["a"]])


def test_what_takes_a_changed_value_by_name_is_told(tmp_path: Path) -> None:
    conf = tmp_path / "config.yaml"
    conf.write_text(
        "n: 8\nbatch_size: ${n}\nworkers: ${n}\nqueue: ${workers}\nwarmup: ${eval:'100*${queue}'}\nseed: 8\n"
    )
    (edit,) = edits_of(conf, {"batch_size": 32})
    assert edit.warnings == (
        "changing n (config.yaml:1) also changes what takes its value: queue, warmup, workers",
    )
    conf.write_text("n: 8\nbatch_size: ${n}\nseed: 8\n")
    (edit,) = edits_of(conf, {"batch_size": 32})
    assert edit.warnings == ()


def test_values_that_name_each_other_end_the_search(tmp_path: Path) -> None:
    conf = tmp_path / "config.yaml"
    conf.write_text("batch_size: 8\na: ${b}\nb: ${a}-${batch_size}\n")
    (edit,) = edits_of(conf, {"batch_size": 32})
    assert edit.warnings == ("changing batch_size (config.yaml:1) also changes what takes its value: a, b",)


def test_all_files_are_written_and_keep_their_mode(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_bytes(b"1")
    one.chmod(0o640)
    write_together({one: b"new", two: b"fresh"})
    assert (one.read_bytes(), two.read_bytes()) == (b"new", b"fresh")
    assert one.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_a_rename_that_fails_puts_back_those_before_it(tmp_path: Path) -> None:
    """A folder cannot be replaced by a file: the second rename fails for real."""
    one, blocked = tmp_path / "one", tmp_path / "blocked"
    one.write_bytes(b"before")
    absent = tmp_path / "absent"
    contents = {one: b"after", absent: b"made", blocked: b"x"}

    def block() -> None:
        blocked.mkdir()
        (blocked / "inside").write_bytes(b"")

    class Blocking(dict[Path, bytes]):
        """Puts the folder in the way after the files were looked at."""

        def items(self):  # type: ignore[no-untyped-def]
            block()
            return super().items()

    with pytest.raises(BadInput, match="could not write"):
        write_together(Blocking(contents))
    assert one.read_bytes() == b"before"
    assert not absent.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blocked", "one"]


def test_a_folder_that_is_gone_changes_nothing(tmp_path: Path) -> None:
    one = tmp_path / "one"
    one.write_bytes(b"before")
    with pytest.raises(BadInput, match=r"could not write .*No such file or directory .*no file was changed"):
        write_together({one: b"after", tmp_path / "gone" / "two": b"x"})
    assert one.read_bytes() == b"before"
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    write_file(tmp_path / "a", b"1")
    with pytest.raises(BadInput, match="could not write"):
        write_file(tmp_path / "a", b"2")
    assert (tmp_path / "a").read_bytes() == b"1"


def test_what_must_not_be_replaced(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_bytes(b"1")
    check_writable(plain)
    plain.chmod(0o444)
    with pytest.raises(BadInput, match=r"plain is read-only \(nothing was written; allow it with chmod"):
        check_writable(plain)
    link = tmp_path / "link"
    link.symlink_to(plain)
    with pytest.raises(BadInput, match="is a symbolic link to"):
        check_writable(link)
    with pytest.raises(BadInput, match="is gone"):
        check_writable(tmp_path / "absent")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadInput, match="is not a plain file"):
        check_writable(tmp_path / "pipe")
