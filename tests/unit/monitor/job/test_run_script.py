"""Scripts under watch in processes of their own: theirs are the output, the signals and the exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

from flatout.ground.runs import CHANNEL_FILE, list_runs, show_state
from flatout.ground.script.main import start_command
from flatout.monitor.job.channel import read_channel
from flatout.monitor.job.run_script import MODULE
from flatout.monitor.sinks.choice import SinkChoice

TRAIN = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
print("arguments", sys.argv[1:], __name__)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
for x, in DataLoader(TensorDataset(torch.randn(24, 3)), batch_size=4):
    model(x).sum().backward()
    optimizer.step()
sys.exit(int(sys.argv[1]))
"""


def options_of(*command: str, sinks: SinkChoice | None = None, **options: object) -> str:
    """What `launch` hands to the process that it becomes."""
    given = {"module": False, "name": None, "hz": 1.0, "folder": None, **options}
    return json.dumps({"command": command, "sinks": asdict(sinks or SinkChoice()), **given})


def start(folder: Path, source: str, *arguments: str, **options: object) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(source)
    chosen = options_of("script.py", *arguments, **options)
    return subprocess.Popen(
        start_command(MODULE, chosen),
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "FLATOUT_RUNS": str(folder / "runs")},
    )


def run(folder: Path, source: str, *arguments: str, **options: object) -> tuple[int, str, str]:
    process = start(folder, source, *arguments, **options)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def test_an_unmodified_script_is_watched_and_keeps_its_exit_code(tmp_path: Path) -> None:
    sinks = SinkChoice(jsonl=str(tmp_path / "samples.jsonl"))
    code, out, err = run(tmp_path, TRAIN, "7", "--lr", "3", sinks=sinks, name="mine")
    assert code == 7, err
    assert out == "arguments ['7', '--lr', '3'] __main__\n"
    ((folder, found),) = list_runs(tmp_path / "runs")
    assert (found.name, found.command[1:]) == ("mine", ("script.py", "7", "--lr", "3"))
    assert found.ended_s is not None
    progress = read_channel(folder / CHANNEL_FILE)
    assert progress is not None
    assert (progress.steps, progress.samples, progress.learning_rate) == (6, 24, 0.25)
    assert f"flatout report {folder.name}" in err
    assert (tmp_path / "samples.jsonl").read_text().startswith('{"format":"flatout-sample"')


def test_a_script_without_torch_stays_without_it(tmp_path: Path) -> None:
    source = "import os, sys; os.environ['OMP_NUM_THREADS'] = '3'; print('torch' in sys.modules, sys.path[0])"
    code, out, _ = run(tmp_path, source)
    assert (code, out) == (0, f"False {tmp_path}\n")


@pytest.mark.parametrize(
    ("source", "shown", "code"),
    [
        ("pass", "finished", 0),
        ("import sys; sys.exit(3)", "failed: exit code 3", 3),
        ("{}['rows']", "failed: KeyError: 'rows'", 1),
    ],
)
def test_how_the_script_ended_is_kept(tmp_path: Path, source: str, shown: str, code: int) -> None:
    assert run(tmp_path, source)[0] == code
    ((_, kept),) = list_runs(tmp_path / "runs")
    assert (show_state(kept), kept.exit_code) == (shown, code)


def test_an_interrupt_reaches_the_script(tmp_path: Path) -> None:
    source = (
        "try:\n    print('ready', flush=True); input()\n"
        "except KeyboardInterrupt:\n    print('interrupted'); raise SystemExit(9)\n"
    )
    process = start(tmp_path, source)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (9, "interrupted\n"), err


def test_an_interrupt_that_nobody_catches_ends_the_script_as_it_would_alone(tmp_path: Path) -> None:
    source = "kept = open('kept.txt', 'w'); kept.write('all'); print('ready', flush=True); input()"
    process = start(tmp_path, source)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT, err
    assert "KeyboardInterrupt" in err and "run_script" not in err
    ((_, found),) = list_runs(tmp_path / "runs")
    assert found.ended_s is not None
    assert (tmp_path / "kept.txt").read_text() == "all"


def test_a_forked_child_ends_without_its_parents_sinks(tmp_path: Path) -> None:
    source = """
import os, sys
child = os.fork()
if not child:
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    code, out, err = run(tmp_path, source, sinks=SinkChoice(prometheus=0))
    assert (code, out) == (0, "7\n"), err
    assert err.count("the run is kept") == 1


@pytest.mark.parametrize("gone", ["sys.stderr = None", "sys.stderr.close()", "os.close(2)"])
def test_a_script_without_stderr_goes_on_and_keeps_its_stdout(tmp_path: Path, gone: str) -> None:
    source = f"import os, sys\n{gone}\nprint('mine'); sys.exit(4)"
    code, out, err = run(tmp_path, source, hz=10.0)
    assert (code, out) == (4, "mine\n")
    assert "Traceback" not in err


def test_what_cannot_be_set_up_is_one_line_before_the_script_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    sinks = SinkChoice(csv=str(tmp_path / "file" / "table.csv"))
    for options in ({"sinks": sinks}, {"hz": 100.0}):
        code, out, err = run(tmp_path, "print('started')", **options)
        assert (code, out) == (2, "")
        assert err.startswith("flatout: ") and err.count("\n") == 1
        assert list_runs(tmp_path / "runs") == ()


def test_a_full_disk_is_said_once_and_harms_nobody(tmp_path: Path) -> None:
    source = """
import resource
from flatout.monitor.job import watch as job
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
while not any("HistoryWriter" in note for sample in job._run.sampler.recent() for note in sample.notes):
    pass
print("done")
"""
    sinks = SinkChoice(jsonl=str(tmp_path / "samples.jsonl"))
    code, out, err = run(tmp_path, source, hz=10.0, sinks=sinks)
    assert (code, out) == (0, "done\n"), err
    for name in ("HistoryWriter", "JsonLines"):
        assert err.count(f"flatout: {name} failed: ") == 1
    assert "its log is incomplete" in err
    assert "Traceback" not in err


def test_a_run_that_is_removed_while_it_is_written_is_not_said_to_be_kept(tmp_path: Path) -> None:
    source = f"import shutil; shutil.rmtree({str(tmp_path / 'runs')!r}); print('trained')"
    code, out, err = run(tmp_path, source)
    assert (code, out) == (0, "trained\n")
    last = err.splitlines()[-1]
    assert "the run is not kept" in last and last.endswith("was removed while the script ran")


def test_a_killed_script_leaves_a_run_that_died(tmp_path: Path) -> None:
    from flatout.ground.runs import state_of

    process = start(tmp_path, "print('ready', flush=True); input()")
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.communicate(timeout=60)
    ((_, found),) = list_runs(tmp_path / "runs")
    assert state_of(found) == "died"
