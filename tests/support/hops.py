"""How many files a request passes on its way to the work: `python -m tests.support.hops [VERB...] [--files]`

A hop is a file on the call path from the command down to the work.  While a verb runs on a tiny input, every
call between two functions of Flatout is recorded on the main thread of the command.  Four numbers come out:

hops      the longest chain: the most files that are open at once, one calling the next
trunk     files that pass the request on (a function in them calls one in another file) and take part in at
          least 1 % of the verb's time: what a reader opens who wants to know how the verb works
callers   files that call another file at all, however briefly
all       files of which any function ran: the helpers too

Module bodies (imports) are not calls.  A child process starts a path of its own and is not counted; `watch
--run` becomes its script by exec, and its path is followed into the process that it becomes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SHARE = 0.01


class Recorder:
    """Follows the calls of the main thread; `within` says which files are ours."""

    def __init__(self, within: Path) -> None:
        self._within = f"{within}{os.sep}"
        self._stack: list[
            tuple[str | None, float]
        ] = []  # file of each open call, None: not ours or an import
        self._open: dict[str, int] = {}
        self._edges: set[tuple[str, str]] = set()
        self.seconds: dict[str, float] = {}
        self.deepest: tuple[str, ...] = ()

    def _event(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            name = frame.f_code.co_filename
            ours = name.startswith(self._within) and frame.f_code.co_name != "<module>"
            self._enter(name.removeprefix(self._within) if ours else None)
        elif event == "return" and self._stack:
            self._leave()

    def _enter(self, file: str | None) -> None:
        caller = next((name for name, _ in reversed(self._stack) if name is not None), None)
        self._stack.append((file, time.perf_counter()))
        if file is None:
            return
        if caller is not None and caller != file:
            self._edges.add((caller, file))
        self._open[file] = self._open.get(file, 0) + 1
        chain = {name for name, _ in self._stack if name is not None}
        if len(chain) > len(self.deepest):
            self.deepest = tuple(dict.fromkeys(name for name, _ in self._stack if name is not None))

    def _leave(self) -> None:
        file, began_s = self._stack.pop()
        if file is None:
            return
        self._open[file] -= 1
        if not self._open[file]:  # the outermost call into this file
            self.seconds[file] = self.seconds.get(file, 0.0) + time.perf_counter() - began_s

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        sys.setprofile(self._event)
        try:
            yield
        finally:
            sys.setprofile(None)
            while self._stack:
                self._leave()

    @property
    def callers(self) -> set[str]:
        return {caller for caller, _ in self._edges}

    @property
    def trunk(self) -> list[str]:
        """Callers that matter to the verb's time, the longest first."""
        whole = max(self.seconds.values(), default=0.0)
        found = [file for file in self.callers if self.seconds.get(file, 0.0) >= SHARE * whole]
        return sorted(found, key=lambda file: -self.seconds[file])

    @property
    def num_files(self) -> int:
        return len(self.seconds)


def command(*arguments: object) -> None:
    """Run `flatout ARGUMENTS` in this process."""
    from flatout.cli.app import main

    sys.argv = ["flatout", *map(str, arguments)]
    with contextlib.suppress(SystemExit):
        main()


def diagnose(folder: Path) -> Callable[[], None]:
    script = folder / "train.py"
    script.write_text(
        "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        "model = torch.nn.Linear(8, 1); optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for x, in DataLoader(TensorDataset(torch.randn(4096, 8)), batch_size=4):\n"
        "    model(x).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
    )
    return lambda: command("diagnose", "--seconds", 1, "--save", folder / "e.json", script)


JOB = """\
import torch
from flatout.memory.jobs.job import Job, Recipe


def build(settings):
    return Job(
        name="tiny",
        make_model=lambda: torch.nn.Linear(64, 64),
        make_batch=lambda *, batch_size: torch.zeros(batch_size, 64),
        loss=lambda model, batch: model(batch).sum(),
        make_optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        sizes={"batch_size": 4},
    ), Recipe(accumulation=4)
"""


def plan_fit(folder: Path) -> Callable[[], None]:
    (folder / "config.yaml").write_text("batch_size: 4\naccumulate_grad_batches: 4\n")
    (folder / "job.py").write_text(JOB)
    flags = ("--model", f"{folder / 'job.py'}:build", "--gpu-memory", "24GB", "--apply", "--yes")
    return lambda: command("plan", "fit", folder / "config.yaml", *flags)


def plan(folder: Path) -> Callable[[], None]:
    import torch

    import flatout

    model, batch = torch.nn.Linear(8, 8), torch.zeros(4, 8)
    return lambda: print(flatout.plan(model, batch, loss=lambda m, b: m(b).sum(), device="A100-80GB"))


def evolve(folder: Path) -> Callable[[], None]:
    made_by(EXAMPLES / "evolution" / "tiny_model.py", folder / "model")
    config = EXAMPLES / "evolution" / "digit_copy.yaml"
    flags = ("--model", folder / "model", "--out", folder / "run", "--epochs", 20)
    return lambda: command("evolve", config, *flags)


def steer_search(folder: Path) -> Callable[[], None]:
    made_by(EXAMPLES / "steering" / "tiny_model.py", folder)
    files = ("--model", folder / "model", "--questions", folder / "questions.jsonl", "--out", folder / "run")
    return lambda: command("steer", "search", EXAMPLES / "steering" / "tiny.yaml", *files, "--trials", 16)


def adapt_train(folder: Path) -> Callable[[], None]:
    made_by(EXAMPLES / "adapters" / "tiny_encoder.py", folder / "model")
    config = EXAMPLES / "adapters" / "generated.yaml"
    files = ("--model", folder / "model", "--out", folder / "run")
    brief = ("--phase", 1, "--set", "phase1.steps=10", "--set", "phase1.evaluate_every=5")
    return lambda: command("adapt", "train", config, *files, *brief)


def watch_run(folder: Path) -> Callable[[], None]:
    diagnose(folder)

    def become(_: str, arguments: list[str]) -> None:
        *_, code, argument = arguments  # python -c CODE ARGUMENT
        sys.argv = ["-c", argument]
        with contextlib.suppress(SystemExit):
            exec(code, {"__name__": "__main__"})
        raise SystemExit

    os.execv = become  # type: ignore[assignment]
    return lambda: command("watch", "--log", folder / "runs", "--run", folder / "train.py")


def made_by(script: Path, folder: Path) -> None:
    argv, sys.argv = sys.argv, [str(script), str(folder)]
    with contextlib.redirect_stdout(sys.stderr):
        runpy.run_path(str(script), run_name="__main__")
    sys.argv = argv


VERBS: dict[str, Callable[[Path], Callable[[], None]]] = {
    "diagnose": diagnose,
    "plan fit --apply": plan_fit,
    "flatout.plan": plan,
    "evolve": evolve,
    "steer search": steer_search,
    "adapt train": adapt_train,
    "watch --run": watch_run,
}


def record(verb: str) -> Recorder:
    import flatout

    os.environ["FLATOUT_CACHE"] = tempfile.mkdtemp()
    with tempfile.TemporaryDirectory() as folder:
        run = VERBS[verb](Path(folder))
        recorder = Recorder(Path(flatout.__file__).parent)
        with recorder.recording(), contextlib.redirect_stdout(sys.stderr):
            run()
    return recorder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", nargs="*", default=list(VERBS))
    parser.add_argument("--files", action="store_true", help="name them")
    given: Any = parser.parse_args()
    for verb in given.verb:
        found = record(verb)
        counts = {
            "hops": len(found.deepest),
            "trunk": len(found.trunk),
            "callers": len(found.callers),
            "all": found.num_files,
        }
        print(f"{verb:<18}" + "".join(f"{name} {count:<4}" for name, count in counts.items()))
        if given.files:
            for file in found.trunk:
                print(f"    {found.seconds[file]:8.3f} s  {file}")
            print("    " + " > ".join(found.deepest))


if __name__ == "__main__":
    main()
