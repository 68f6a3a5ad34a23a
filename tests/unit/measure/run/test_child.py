from __future__ import annotations

import json
from pathlib import Path

from flatout.ground.codec import encode
from flatout.ground.script.main import start_command
from flatout.measure.evidence_file import load_evidence
from flatout.measure.run.child import MODULE
from flatout.measure.run.session import JobOptions
from tests.support.measure import BY_HAND, run, write_script


def test_the_observed_process_runs_the_script_as_main_and_saves(tmp_path: Path) -> None:
    """The script replaces `__main__`; what the observation stands on keeps its own name."""
    body = """
    import flatout.measure.run.child
    assert sys.modules["__main__"].__dict__ is globals(), "the script is __main__"
    for x, y in DataLoader(data, batch_size=32):
        train_step(x, y)
    """
    write_script(tmp_path / "train.py", body, preamble=BY_HAND)
    options = JobOptions(
        command=("train.py",),
        module=False,
        folder=str(tmp_path),
        evidence_path=str(tmp_path / "e.json"),
        keep_running=False,
        seconds=1.0,
        skipped={},
        progress_fd=None,
    )
    ran = run(start_command(MODULE, json.dumps(encode(options))), folder=tmp_path)
    assert (ran.code, ran.stdout, ran.stderr, ran.left) == (0, "", "", ())
    evidence = load_evidence(tmp_path / "e.json")
    assert (evidence.job.ended, evidence.job.anchor) == ("finished", "backward")
    assert evidence.steps
