"""What other tools say of the planted scripts, in the terms of Flatout's rules.

    python benchmarks/diagnosis/peers.py SCRIPT     what torch.profiler's pattern matcher says, as JSON

TraceML (`pip install traceml-ai`) is run by its own command.  For a plain loop its manual asks for two lines,
`traceml.init()` and `with traceml.trace_step(model):` around a step; they are added to a copy of the script,
around the body of the innermost loop that reaches `optimizer.step()`.  The pattern matcher gets the script as
it is, and a profile of ten steps with stacks and shapes, from the first loader on.

Peers name categories, so `TRACEML` and `PATTERNS` map each to every rule that it could mean, by the first
letters of codes.  All is read in the peer's favour: one word of the right category finds all guilty lines of
that category, what has no category here is not counted, and a state (`STATES`) is never wrong.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import re
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SECONDS, NUM_TRACED = 6.0, 25  # TraceML sees as many seconds of steps, and steps; below 20 it is not sure
NUM_STEPS = 10  # in a profile
LIMIT_S = 120

TRACEML = {
    "INPUT_BOUND": ("FO1",),
    "H2D_BOUND": ("FO201", "FO206", "FO208", "FO209"),
    "RESIDUAL_HEAVY": ("FO2", "FO3", "FO8"),
    "COMPUTE_BOUND": ("FO3", "FO4", "FO504", "FO506", "FO6"),
    "HIGH_CPU": ("FO107", "FO109"),
    "HIGH_PROCESS_CPU": ("FO107", "FO109"),
    "LOW_GPU_UTILIZATION": ("FO305",),
    "MODERATE_GPU_UTILIZATION": ("FO305",),
    "CREEP_EARLY": ("FO501",),
    "CREEP_CONFIRMED": ("FO501",),
    "HIGH_PRESSURE": ("FO502",),
    "HIGH_GPU_MEMORY": ("FO502",),
    "VERY_HIGH_GPU_MEMORY": ("FO502",),
    "HIGH_PROCESS_GPU_MEMORY": ("FO502",),
    "VERY_HIGH_PROCESS_GPU_MEMORY": ("FO502",),
    "GPU_MEMORY_RESERVED_OVERHANG": ("FO503",),
}
# What a healthy job may be told too.
STATES = (
    *("COMPUTE_BOUND", "HIGH_CPU", "HIGH_PROCESS_CPU"),
    *("LOW_GPU_UTILIZATION", "MODERATE_GPU_UTILIZATION"),
)
PATTERNS = {
    "ExtraCUDACopyPattern": ("FO201", "FO206", "FO208", "FO301"),
    "ForLoopIndexingPattern": ("FO221", "FO301", "FO302", "FO303", "FO304", "FO308"),
    "FP32MatMulPattern": ("FO401", "FO402"),
    "MatMulDimInFP16Pattern": ("FO409",),
    "OptimizerSingleTensorPattern": ("FO306", "FO307", "FO403"),
    "SynchronizedDataLoaderPattern": ("FO1",),
}
ON_CUDA_ALONE = ("ExtraCUDACopyPattern", "FP32MatMulPattern")  # elsewhere they speak of every product

TRACEML_HEAD = """import time, torch
import traceml_ai as traceml
traceml.init()
TRACED = []
def first_module(names):  # for a script that trains a list of them
    found = [each for value in names.values() for each in (value if isinstance(value, list) else [value])]
    return next((each for each in found if isinstance(each, torch.nn.Module)), torch.nn.Identity())
"""

Said = list[tuple[str, int | None]]  # (category, line of the script), most important first


class CannotRun(Exception):
    """A peer that gave no answer."""


def ask_traceml(script: Path) -> Said:
    """Run a copy of the script under `traceml run`; the issues of all sections, the primary one first."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        (work / script.name).write_text(with_traced_steps(script.read_text()))
        ports = [f"--{owner}-port={_free_port()}" for owner in ("aggregator", "master")]
        options = ["--run-name=planted", "--logs-dir=logs", "--interval=0.5", "--finalize-timeout-sec=30"]
        command = [sys.executable, "-c", "from traceml_ai.launcher.cli import main; main()", "run"]
        _run([*command, *options, *ports, script.name], work)
        path = work / "logs" / "planted" / "final_summary.json"
        if not path.exists():
            raise CannotRun("no summary was written")
        summary = json.loads(path.read_text())
    primary = summary["primary_diagnosis"]
    if primary["kind"] == "INSUFFICIENT_STEP_TIME_DATA":
        raise CannotRun(f"{primary['kind']}: {primary['summary']}")
    sections = [summary[name]["issues"] for name in ("step_time", "step_memory", "process", "system")]
    kinds = [primary["kind"], *(issue["kind"] for issues in sections for issue in issues)]
    return [(kind, None) for kind in dict.fromkeys(kinds) if kind in TRACEML]


def with_traced_steps(text: str) -> str:
    """The script as TraceML's manual wants it, ending after a few seconds of steps."""
    tree = ast.parse(text)
    steppers = {
        function.name
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        and _calls(function, _is_step)
        and not any(_calls(loop, _is_step) for loop in _loops(function))
    }

    def takes_step(call: ast.Call) -> bool:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
        return name in steppers or _is_step(call)

    (loop, *_others) = [
        loop
        for loop in _loops(tree)
        if _calls(loop, takes_step) and not any(_calls(inner, takes_step) for inner in _loops(loop))
    ]
    owners = ["model", *re.findall(r"([\w.]+)\.parameters\(\)", text)]
    models = [name for name in owners if re.search(rf"(?m)^\s*{re.escape(name)}\b[^=\n]* = ", text)]
    step = ast.parse(
        f"with traceml.trace_step({[*models, 'first_module(globals())'][0]}):\n    pass\n"
        "TRACED.append(time.monotonic())\n"
        f"if TRACED[-1] - TRACED[0] > {SECONDS} and len(TRACED) > {NUM_TRACED}: raise SystemExit"
    )
    assert isinstance(step.body[0], ast.With)
    step.body[0].body, loop.body = loop.body, step.body
    if (
        isinstance(loop, ast.For) and "DataLoader(" not in text
    ):  # else it sees no wait, and says nothing at all
        loop.iter = ast.parse(f"traceml.wrap_dataloader_fetch({ast.unparse(loop.iter)})", mode="eval").body
    return TRACEML_HEAD + ast.unparse(tree) + "\n"


def _is_step(call: ast.Call) -> bool:
    return re.match(r"[\w.]*(optimizer|scaler)\.step\(", ast.unparse(call)) is not None


def _calls(tree: ast.AST, wanted: Callable[[ast.Call], bool]) -> bool:
    return any(isinstance(node, ast.Call) and wanted(node) for node in ast.walk(tree))


def _loops(tree: ast.AST) -> list[ast.For | ast.While]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While) and node is not tree]


def ask_pattern_matcher(script: Path) -> Said:
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        (work / script.name).write_text(script.read_text())
        found = _run([sys.executable, str(Path(__file__).resolve()), script.name], work)
    lines = [line for line in found.splitlines() if line.startswith('{"said"')]
    if not lines:
        raise CannotRun("the script ended before its profile")
    return [(name, line) for name, line in json.loads(lines[-1])["said"]]


def _run(command: list[str], work: Path) -> str:
    try:
        done = subprocess.run(
            command,
            cwd=work,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CannotRun(f"not ended after {LIMIT_S} s") from None
    if done.returncode:
        raise CannotRun(f"exit code {done.returncode}: {done.stderr.strip()[-200:]}")
    return done.stdout


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


class Profile:
    """A profile of some steps of this process; the first loader that is made begins it, or the first step."""

    def __init__(self, script: str) -> None:
        import torch

        self.script, self.num_steps = script, 0
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.profiler = torch.profiler.profile(activities=activities, with_stack=True, record_shapes=True)
        self.began_s: float | None = None

    def begin(self) -> None:
        if self.began_s is None:
            self.began_s = time.monotonic()
            self.profiler.start()

    def step_end(self, *_unused: Any) -> None:
        if self.began_s is None:
            self.begin()
            return
        self.num_steps += 1
        if self.num_steps == NUM_STEPS or time.monotonic() - self.began_s > SECONDS:
            self.profiler.stop()
            print(json.dumps({"said": list(dict.fromkeys(self.said()))}), flush=True)
            os._exit(0)

    def said(self) -> Iterator[tuple[str, int | None]]:
        import torch
        from torch.profiler import _pattern_matcher

        for name in PATTERNS:
            if name in ON_CUDA_ALONE and not torch.cuda.is_available():
                continue
            pattern = getattr(_pattern_matcher, name)(self.profiler)
            for event in filter(_matcher(pattern), [] if pattern.skip else pattern.eventTreeTraversal()):
                place = re.search(r"\[Source Code Location\] (.*):(\d+)", pattern.report(event))
                is_ours = place is not None and Path(place[1]).name == self.script
                yield name, int(place[2]) if place is not None and is_ours else None


def _matcher(pattern: Any) -> Callable[[Any], bool]:
    """The pattern's own test; names of some Python functions are freed too early, and cannot be read."""

    def matches(event: Any) -> bool:
        try:
            return bool(pattern.match(event))
        except UnicodeDecodeError:
            return False

    return matches


def profile_script(script: str) -> None:
    """Run the script as `python SCRIPT` would until its profile is taken, and print what the patterns say."""
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.utils.data import DataLoader

    profile = Profile(script)
    make = DataLoader.__init__

    def begin_then_make(*arguments: Any, **options: Any) -> None:
        profile.begin()
        make(*arguments, **options)

    DataLoader.__init__ = begin_then_make  # type: ignore[method-assign]
    register_optimizer_step_post_hook(profile.step_end)
    sys.argv = [script]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def peers() -> dict[str, tuple[str, Callable[[Path], Said] | str]]:
    """Name -> (version, how it is asked, or why it cannot be)."""
    import torch

    found: dict[str, tuple[str, Callable[[Path], Said] | str]] = {}
    if importlib.util.find_spec("traceml_ai") is None:
        found["TraceML"] = ("", "not installed: pip install traceml-ai")
    else:
        found["TraceML"] = (importlib.metadata.version("traceml-ai"), ask_traceml)
    found["torch.profiler patterns"] = (torch.__version__, ask_pattern_matcher)
    return found


if __name__ == "__main__":
    profile_script(sys.argv[1])
