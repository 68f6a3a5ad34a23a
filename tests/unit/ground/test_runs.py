"""Folders of runs: found by any part of their name, and honest about runs that died."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.ground.errors import BadInput, Interrupted
from flatout.ground.runs import (
    RUN_FILE,
    Run,
    boot_age_s,
    create_run,
    end_of,
    end_run,
    find_run,
    home_folder,
    is_alive,
    list_runs,
    process_key,
    process_started_s,
    read_run,
    recorded_run,
    runs_folder,
    show_state,
    state_of,
    this_run,
    time_of,
    write_run,
)


def a_run(name: str = "train", *, pid: int = 7, started_s: float = 1.7e9) -> Run:
    return Run(name=name, pid=pid, process_started_s=None, started_s=started_s)


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = replace(a_run(), command=("python", "train.py"), rank=1, world_size=2, visible_devices="0,1")
    folder = create_run(run, tmp_path)
    assert read_run(folder) == run
    assert [path.name for path in folder.iterdir()] == [RUN_FILE]
    end_run(folder, time_s=5.0)
    assert read_run(folder).ended_s == 5.0
    assert state_of(read_run(folder)) == "ended"


@pytest.mark.parametrize("name", ["../../etc", "<script>", "a" * 500, "", "..", "new\nline", "/"])
def test_a_hostile_name_stays_inside_the_folder(tmp_path: Path, name: str) -> None:
    folder = create_run(a_run(name), tmp_path)
    assert folder.parent == tmp_path
    assert len(folder.name) < 100
    assert not set(folder.name) & set("/<>\n\0")
    assert read_run(folder).name == name


def test_this_process_is_alive_and_a_finished_one_is_not() -> None:
    run = this_run(time_s=1.0)
    assert (run.pid, state_of(run)) == (os.getpid(), "running")
    assert run.command
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert not is_alive(child.pid, None)
    assert state_of(a_run(pid=child.pid)) == "died"


def test_a_number_that_was_given_to_a_later_process_is_not_the_run() -> None:
    started_s = process_started_s(os.getpid())
    assert started_s is not None
    assert is_alive(os.getpid(), started_s)
    assert not is_alive(os.getpid(), started_s - 3600)


def test_a_clock_that_is_set_kills_no_run() -> None:
    """Linux counts the start of a process from the boot: where the clock is set, both move along."""
    run = this_run(time_s=time.time())
    assert run.process_started_s is not None and run.process_key == process_key(os.getpid())
    if run.process_key is None:
        pytest.skip("this system has no key of a process")
    set_back = replace(run, process_started_s=run.process_started_s - 3600)
    assert state_of(set_back) == "running"
    assert state_of(replace(set_back, process_key=None)) == "died"
    of_another_boot = replace(run, process_key=f"0 {run.process_key.split()[1]}")
    assert state_of(of_another_boot) == "died"


@pytest.mark.parametrize("moved_s", [3600.0, -3600.0])
def test_a_clock_that_is_set_makes_a_run_neither_longer_nor_shorter(tmp_path: Path, moved_s: float) -> None:
    run = this_run(time_s=time.time())
    if run.boot_age_s is None or run.process_key is None:
        pytest.skip("this system does not count the seconds since its boot")
    folder = create_run(run, tmp_path)
    end_run(folder, time_s=time.time() + moved_s)
    ended_s = read_run(folder).ended_s
    assert ended_s is not None
    assert 0 <= ended_s - run.started_s <= (boot_age_s() or 0.0) - run.boot_age_s
    of_another_boot = replace(run, process_key=f"0 {run.process_key.split()[1]}")
    assert time_of(of_another_boot, run.started_s + moved_s) == run.started_s + moved_s


def test_a_rank_is_read_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    run = this_run("x", time_s=1.0)
    assert (run.name, run.rank, run.world_size, run.visible_devices) == ("x", 3, 8, "1")


def test_runs_are_listed_with_the_latest_first_and_foreign_folders_are_passed_over(tmp_path: Path) -> None:
    first = create_run(a_run("one", started_s=1.7e9), tmp_path)
    second = create_run(a_run("two", started_s=1.8e9), tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / RUN_FILE).write_text('{"format": "flatout-run", "version": 1, "pid": "x"}')
    assert [folder for folder, _ in list_runs(tmp_path)] == [second, first]
    assert list_runs(tmp_path / "none") == ()


def test_a_run_is_found_by_its_path_its_name_or_a_part_of_it(tmp_path: Path) -> None:
    one = create_run(a_run("one"), tmp_path)
    create_run(a_run("two"), tmp_path)
    create_run(a_run("two", pid=77), tmp_path)
    assert find_run(str(one), tmp_path) == find_run(one.name, tmp_path) == find_run("one", tmp_path) == one
    with pytest.raises(BadInput, match="several"):
        find_run("two", tmp_path)
    with pytest.raises(BadInput, match="no run"):
        find_run("three", tmp_path)
    with pytest.raises(BadInput, match="no run"):
        find_run("", tmp_path)


@pytest.mark.parametrize(
    ("text", "word"),
    [("", "holds no run"), ("[]", "is not a run"), ('{"format": "flatout-run", "version": 9}', "version 9")],
)
def test_a_file_that_is_no_run_is_refused(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / RUN_FILE).write_text(text)
    with pytest.raises(BadInput, match=word):
        read_run(tmp_path)


def test_runs_are_kept_where_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLATOUT_RUNS", str(tmp_path / "mine"))
    assert runs_folder() == tmp_path / "mine"
    monkeypatch.delenv("FLATOUT_RUNS")
    monkeypatch.chdir(tmp_path)
    assert runs_folder() == tmp_path / ".flatout" / "runs"


def test_two_runs_of_one_process_in_one_second_are_two_folders(tmp_path: Path) -> None:
    folders = [create_run(a_run(name=name), tmp_path) for name in ("train", "train", "other")]
    assert len(set(folders)) == 3
    assert [run.name for _, run in list_runs(tmp_path)].count("train") == 2


def test_git_ignores_the_folder_that_runs_live_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLATOUT_RUNS", raising=False)
    monkeypatch.chdir(tmp_path)
    folder = create_run(a_run())
    assert folder.is_relative_to(tmp_path / ".flatout" / "runs")
    assert (tmp_path / ".flatout" / ".gitignore").read_text() == "*\n"
    elsewhere = create_run(a_run(), tmp_path / "elsewhere")
    assert not list(elsewhere.parent.glob(".*")) and not (tmp_path / ".gitignore").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    for folder in (tmp_path / "thesis.txt", tmp_path / "thesis.txt" / "run"):
        with (
            pytest.raises(BadInput, match=r"thesis\.txt.* cannot be written: "),
            recorded_run(folder, a_run()),
        ):
            pytest.fail("began")
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_a_recorded_run_says_how_it_ended(tmp_path: Path) -> None:
    run = replace(a_run(), kind="evolve")
    with recorded_run(tmp_path / "one", run):
        assert read_run(tmp_path / "one") == run
    ended = read_run(tmp_path / "one")
    assert (ended.end, state_of(ended)) == ("finished", "ended")
    for error, said in ((Interrupted("stopped"), "interrupted"), (BadInput("no room"), "no room")):
        with pytest.raises(type(error)), recorded_run(tmp_path / "two", run):
            raise error
        assert read_run(tmp_path / "two").end == said
    write_run(tmp_path / "two", replace(run, pid=os.getppid()))  # that process lives
    with pytest.raises(BadInput, match="another run writes"), recorded_run(tmp_path / "two", run):
        pass
    assert read_run(tmp_path / "two").pid == os.getppid()
    create_run(a_run(), tmp_path)
    assert [path.name for path, _ in list_runs(tmp_path, kind="evolve")] == ["one", "two"]
    assert len(list_runs(tmp_path)) == 3


def damaged(**changes: object) -> str:
    run = {
        "format": "flatout-run",
        "version": 1,
        "name": "x",
        "pid": 7,
        "process_started_s": None,
        "started_s": 1.7e9,
    }
    return json.dumps(run | changes)


@pytest.mark.parametrize(
    "text",
    [
        damaged(pid=-5),
        damaged(pid=0),
        damaged(pid=2**70),
        damaged(started_s=float("nan")),
        damaged(started_s=1e300),
        damaged(process_started_s=float("inf")),
        damaged(command=[7]),
        '{"a":' * 100_000,
        "[" * 100_000,
        damaged(name="x" * 5 * 2**20),
        "\0\1",
    ],
    ids=range(11),
)
def test_a_bad_run_is_left_out_and_the_others_are_listed(tmp_path: Path, text: str) -> None:
    good = create_run(a_run(), tmp_path)
    bad = create_run(a_run("bad"), tmp_path)
    (bad / RUN_FILE).write_text(text)
    assert [folder for folder, _ in list_runs(tmp_path)] == [good]
    assert find_run("train", tmp_path) == good
    with pytest.raises(BadInput):
        read_run(bad)


def test_a_pipe_or_a_device_in_the_place_of_a_run_does_not_hang(tmp_path: Path) -> None:
    good = create_run(a_run(), tmp_path)
    for name in ("pipe", "device"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "pipe" / RUN_FILE)
    (tmp_path / "device" / RUN_FILE).symlink_to("/dev/zero")
    assert [folder for folder, _ in list_runs(tmp_path)] == [good]


@pytest.mark.parametrize(
    ("error", "end", "shown"),
    [
        (None, ("finished", 0), "finished"),
        (SystemExit(), ("finished", 0), "finished"),
        (SystemExit(3), ("exit code 3", 3), "failed: exit code 3"),
        (SystemExit("no data"), ("no data", 1), "failed: no data"),
        (KeyboardInterrupt(), ("interrupted", 130), "interrupted"),
        (ValueError("a\nb"), ("ValueError: a b", 1), "failed: ValueError: a b"),
        (MemoryError(), ("MemoryError", 1), "failed: MemoryError"),
    ],
    ids=str,
)
def test_how_a_script_ended_is_kept_and_shown(
    tmp_path: Path, error: BaseException | None, end: tuple[str, int], shown: str
) -> None:
    assert end_of(error) == end
    folder = create_run(a_run(), tmp_path)
    end_run(folder, time_s=5.0, end=end[0], exit_code=end[1])
    assert (read_run(folder).exit_code, show_state(read_run(folder))) == (end[1], shown)
    end_run(folder, time_s=5.0)
    assert show_state(read_run(folder)) == "ended"


SECRET = "s3cr3t-v4lue"


@pytest.mark.parametrize(
    "words",
    [
        ("--api-key", SECRET),
        ("--api_key", SECRET),
        ("--apikey", SECRET),
        ("--token", SECRET),
        (f"--token={SECRET}",),
        (f"--hf-token='{SECRET}'",),
        ("-token", SECRET),
        ("--wandb-key", SECRET),
        ("--api-keys", SECRET),
        ("--db-pass", SECRET),
        (f"--pwd={SECRET}",),
        ("--pw", SECRET),
        ("--bearer", SECRET),
        ("-p", SECRET),
        ("-u", "me", f"-p{SECRET}"),
        ("-ume", f"-p{SECRET}"),
        ("--user=me", f"-p{SECRET}"),
        ("--db.password", SECRET),
        ("--Password", f"-{SECRET}"),
        (f"logger.api_key={SECRET}",),
        (f"HF_TOKEN={SECRET}",),
        (f"postgres://user:{SECRET}@host/db",),
        (f"--data=https://user:{SECRET}@host/x.tar",),
        (f"https://{SECRET}@github.com/a/b",),
        (f"https://host/data?name=x&token={SECRET}&y=1",),
        (f'{{"api_key": "{SECRET}", "x": 1}}',),
        ("--header", f"Authorization: Bearer {SECRET}"),
        (f"sk-{SECRET}-0123456789",),
        (f"ghp_{SECRET}0123456789".replace("-", ""),),
    ],
)
def test_secrets_of_a_command_are_not_written(tmp_path: Path, words: tuple[str, ...]) -> None:
    folder = create_run(replace(a_run(), command=("python", "train.py", *words, "--epochs", "3")), tmp_path)
    text = (folder / RUN_FILE).read_text()
    assert "***" in text
    assert SECRET.replace("-", "") not in text.replace("-", "")
    assert read_run(folder).command[:2] == ("python", "train.py")
    assert read_run(folder).command[-2:] == ("--epochs", "3")


def test_a_secret_in_an_error_is_not_written(tmp_path: Path) -> None:
    folder = create_run(a_run(), tmp_path)
    end_run(folder, time_s=5.0, end=f"ConnectionError: https://user:{SECRET}@host/x refused")
    assert read_run(folder).end == "ConnectionError: https://user:***@host/x refused"


def test_what_is_no_secret_stays(tmp_path: Path) -> None:
    command = (
        *(
            "python",
            "-u",
            "-m",
            "train",
            "--max-tokens",
            "512",
            "--tokenizer=gpt2",
            "--lr=1e-3",
            "--author",
            "me",
        ),
        *("--data", "https://host:8080/a@b", "s3://bucket/key", "git@github.com:a/b", "--keys", "7"),
        *("-p", "8080", "-p", "1e-3", "-p", "--lr", "-profile", "-p8080", "-P", "tcp"),
        *("model.keyword=2", "--use-token", "--epochs", "3", "-" * 100_000, "a" * 100_000, "a-" * 50_000),
    )
    assert read_run(create_run(replace(a_run(), command=command), tmp_path)).command == command


def test_unbuffered_output_is_not_a_user(tmp_path: Path) -> None:
    command = ("python", "-u", "train.py", "-profile")
    assert read_run(create_run(replace(a_run(), command=command), tmp_path)).command == command


def test_folders_of_runs_are_their_owners(tmp_path: Path) -> None:
    folder = create_run(a_run(), tmp_path / "runs")
    assert folder.stat().st_mode & 0o777 == 0o700
    with recorded_run(tmp_path / "evolved", a_run()):
        assert (tmp_path / "evolved").stat().st_mode & 0o777 == 0o700
    (tmp_path / "given").mkdir(mode=0o755)
    with recorded_run(tmp_path / "given", a_run()):
        assert (tmp_path / "given").stat().st_mode & 0o777 == 0o755  # as its owner made it


def test_a_full_disk_is_not_a_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end is written into the room of the file that is there."""
    folder = create_run(this_run("train", time_s=1.0), tmp_path)

    def refuse(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("flatout.ground.runs.replace_whole", refuse)
    end_run(folder, time_s=2.0, end="OSError: No space left on device", exit_code=1)
    run = replace(read_run(folder), pid=2**22 + 1)
    assert show_state(run) == "failed: OSError: No space left on device"
    with pytest.raises(OSError, match="No space"):
        write_run(folder, replace(run, command=("x" * 100_000,)))
    assert read_run(folder).exit_code == 1


def test_a_run_that_finds_no_room_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("flatout.ground.runs.replace_whole", refuse)
    with pytest.raises(OSError, match="No space"):
        create_run(a_run(), tmp_path)
    assert not list(tmp_path.iterdir())


def test_among_temporary_files_the_folder_is_the_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("os.access", lambda path, mode: False)
    folder = home_folder()
    assert folder.name == f"flatout-{os.geteuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert home_folder() == folder
    monkeypatch.delenv("FLATOUT_RUNS", raising=False)
    folder.chmod(0o755)
    with pytest.raises(BadInput, match="only you"):
        runs_folder()
    with pytest.raises(OSError, match="only you"):  # as a job takes it, which then runs unwatched
        create_run(this_run("train", time_s=1.0))
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadInput, match="FLATOUT_RUNS"):
        home_folder()
    folder.unlink()
    folder.mkdir(mode=0o700)
    monkeypatch.setattr("os.geteuid", lambda: 4711)
    (tmp_path / "flatout-4711").mkdir(mode=0o700)
    with pytest.raises(BadInput, match="only you"):
        home_folder()
