from __future__ import annotations

import runpy
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from flatout.measure.evidence import Memory
from flatout.measure.lines.live_memory import MemoryRecorder
from flatout.measure.user_code import UserCode

WARM, WATCHED = 3, 4

HEAD = """
import collections
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters())
loss_function = nn.CrossEntropyLoss()
batches = [(torch.randn(8, 16), torch.randint(4, (8,))) for _ in range(4)]
"""

LOOP = """
def main():
    {before}
    for number in range(10):
        x, y = batches[number % 4]
        optimizer.zero_grad()
        logits = model(x)
        loss = loss_function(logits, y)
        loss.backward()
        optimizer.step()
        {after}

main()
"""


def watched(folder: Path, source: str) -> Memory:
    """Run a script and watch it as a diagnosis does, from inside the optimizer's hook."""
    script = folder / "train.py"
    script.write_text(textwrap.dedent(source))
    recorder = MemoryRecorder(UserCode(str(folder)), "cpu")
    found: list[Memory] = []
    steps = 0

    def boundary(*_: object) -> None:
        nonlocal steps
        steps += 1
        if WARM < steps <= WARM + WATCHED:
            recorder.step_end()
        if steps == WARM:
            recorder.start()
        elif steps == WARM + WATCHED:
            found.append(recorder.stop())

    handle = register_optimizer_step_post_hook(boundary)
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        handle.remove()
    (memory,) = found
    return memory


def loop(after: str, *, before: str = "pass") -> str:
    return HEAD + LOOP.format(before=before, after=after)


def line_of(source: str, part: str) -> int:
    (number,) = [n for n, text in enumerate(textwrap.dedent(source).splitlines(), start=1) if part in text]
    return number


def the_holder(memory: Memory) -> tuple[str | None, int | None]:
    (graph,) = memory.graphs
    return graph.holder, graph.holder_place.line if graph.holder_place else None


def test_a_running_total_keeps_every_graph(tmp_path: Path) -> None:
    source = loop("total += loss", before="total = 0")
    memory = watched(tmp_path, source)
    assert the_holder(memory) == ("total", line_of(source, "total += loss"))
    assert memory.graphs[0].nodes_per_step >= 4
    assert memory.num_steps == WATCHED


def test_a_total_written_out(tmp_path: Path) -> None:
    source = loop("total = total + loss", before="total = torch.zeros(())")
    assert the_holder(watched(tmp_path, source)) == ("total", line_of(source, "total = total + loss"))


def test_a_list_of_losses(tmp_path: Path) -> None:
    source = loop("losses.append(loss)", before="losses = []")
    memory = watched(tmp_path, source)
    assert the_holder(memory) == ("losses", line_of(source, "losses.append(loss)"))
    growth = next(growth for growth in memory.growth if growth.holder == "losses")
    assert growth.place is not None and growth.place.line == line_of(source, "loss = loss_function")
    assert growth.with_graph and growth.tensors_per_step == 1
    assert growth.holder_place is not None and growth.holder_place.function == "main"


def test_a_list_of_outputs_at_module_level(tmp_path: Path) -> None:
    source = (
        HEAD
        + """
outputs = []
for number in range(10):
    x, y = batches[number % 4]
    optimizer.zero_grad()
    logits = model(x)
    loss_function(logits, y).backward()
    optimizer.step()
    outputs.append(logits)
"""
    )
    memory = watched(tmp_path, source)
    (growth,) = [growth for growth in memory.growth if growth.holder is not None]
    assert (growth.holder, str(growth.holder_place)) == ("outputs", f"train.py:{line_of(source, 'append')}")
    assert str(growth.place) == f"train.py:{line_of(source, 'logits = model')}"
    assert growth.bytes_per_step == 8 * 4 * 4
    assert memory.growth_bytes_per_step >= growth.bytes_per_step


def test_detached_outputs_grow_without_a_graph(tmp_path: Path) -> None:
    memory = watched(tmp_path, loop("outputs.append(logits.detach())", before="outputs = []"))
    assert memory.graphs == ()
    (growth,) = memory.growth
    assert (growth.holder, growth.with_graph) == ("outputs", False)


def test_a_slice_keeps_the_whole_batch_of_outputs(tmp_path: Path) -> None:
    memory = watched(tmp_path, loop("outputs.append(logits[0].detach())", before="outputs = []"))
    (growth,) = memory.growth
    assert (growth.holder, growth.bytes_per_step) == ("outputs", 8 * 4 * 4)


def test_a_state_carried_without_detach(tmp_path: Path) -> None:
    source = """
        import torch
        from torch import nn
        cell, head = nn.GRUCell(8, 8), nn.Linear(8, 1)
        optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=1e-9, foreach=False)
        for p in (*cell.parameters(), *head.parameters()):
            p.data = p.data.clone()
        def main():
            hidden = torch.zeros(4, 8)
            for number in range(10):
                hidden = cell(torch.randn(4, 8), hidden)
                loss = head(hidden.relu()).mean()
                torch.autograd.grad(loss, list(head.parameters()), retain_graph=True)
                optimizer.step()
        main()
    """
    memory = watched(tmp_path, source)
    assert the_holder(memory) == ("hidden", line_of(source, "hidden = cell"))
    assert memory.growth and all(growth.with_graph for growth in memory.growth)
    assert {growth.holder for growth in memory.growth} == {None}  # saved by the graph: its victims
    assert memory.growth_bytes_per_step > 0


def test_activations_cached_by_a_hook(tmp_path: Path) -> None:
    source = (
        HEAD
        + """
class Probe:
    def __init__(self, module):
        self.activations = []
        module.register_forward_hook(self.keep)

    def keep(self, module, inputs, output):
        self.activations.append(output)

probe = Probe(model[0])
"""
        + LOOP.format(before="pass", after="pass")
    )
    memory = watched(tmp_path, source)
    held = [growth for growth in memory.growth if growth.holder is not None]
    assert {growth.holder for growth in held} == {"self.activations"}
    assert {str(growth.holder_place) for growth in held} == {
        f"train.py:{line_of(source, 'activations.append')}"
    }
    assert the_holder(memory) == ("self.activations", line_of(source, "activations.append"))


CLEAN = {
    "item": ("total += loss.item()", "total = 0.0"),
    "detach": ("total = total + loss.detach()", "total = torch.zeros(())"),
    "last step's variables": ("kept = (loss, logits)", "kept = None"),
    "previous loss": ("previous, current = current, loss", "previous = current = None"),
    "bounded deque": ("recent.append(loss)", "recent = collections.deque(maxlen=100)"),
    "full deque": ("recent.append(loss)", "recent = collections.deque(maxlen=2)"),
    "list used as a ring": ("ring[number % 2] = loss", "ring = [None, None]"),
    "list of fixed length": ("ring.append(logits); ring.pop(0)", "ring = [None] * 20"),
    "moving average": ("mean = 0.9 * mean + 0.1 * logits.detach()", "mean = torch.zeros(8, 4)"),
    "replay buffer": ("replay[number] = logits.detach()", "replay = torch.zeros(10, 8, 4)"),
    "numbers": ("history.append(loss.item())", "history = []"),
    "cycle": ("node = {'loss': logits.detach()}; node['self'] = node", "pass"),
}


@pytest.mark.parametrize("name", CLEAN)
def test_clean_scripts_give_nothing(tmp_path: Path, name: str) -> None:
    after, before = CLEAN[name]
    memory = watched(tmp_path, loop(after, before=before))
    assert (memory.growth, memory.graphs, memory.growth_bytes_per_step) == ((), (), 0.0)


def test_a_ring_beside_a_leak_is_not_blamed(tmp_path: Path) -> None:
    source = loop(
        "ring.append(logits); ring.pop(0); losses.append(loss)", before="ring, losses = [None] * 20, []"
    )
    memory = watched(tmp_path, source)
    assert {growth.holder for growth in memory.growth} == {"losses"}
    assert {graph.holder for graph in memory.graphs} == {"losses"}


def test_graphs_of_varying_size_are_no_growth(tmp_path: Path) -> None:
    source = (
        HEAD
        + """
def main():
    for number in range(10):
        optimizer.zero_grad()
        loss = sum(model(batches[0][0]).sum() for _ in range(number + 1))
        loss.backward()
        optimizer.step()

main()
"""
    )
    memory = watched(tmp_path, source)
    assert (memory.growth, memory.graphs) == ((), ())


def test_state_made_while_watching_is_no_growth(tmp_path: Path) -> None:
    source = loop(
        "extra.step() if number == 4 else None", before="extra = torch.optim.Adam(model.parameters())"
    )
    source = source.replace(
        "extra.step()", "[extra.state[p].update(m=torch.zeros(8)) for p in model.parameters()]"
    )
    assert watched(tmp_path, source).growth == ()


def test_flops_by_the_dtype_that_autocast_chose(tmp_path: Path) -> None:
    source = loop("pass").replace(
        "logits = model(x)", "with torch.autocast('cpu', dtype=torch.bfloat16): logits = model(x)"
    )
    with FlopCounterMode(display=False) as counter:
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
        model(torch.randn(8, 16)).sum().backward()
    flops = watched(tmp_path, source).flops_by_dtype
    assert flops == {"bf16": counter.get_total_flops()}


def test_flops_of_a_convolution_whose_input_wants_no_gradient(tmp_path: Path) -> None:
    image = "model[0](x.view(8, 1, 4, 4))"
    source = loop("pass").replace("nn.Linear(16, 32), nn.ReLU()", "nn.Conv2d(1, 2, 3), nn.Flatten()")
    source = source.replace("nn.Linear(32, 4)", "nn.Linear(8, 4)").replace(
        "model(x)", f"model[2](model[1]({image}))"
    )
    with FlopCounterMode(display=False) as counter:
        convolution, linear = torch.nn.Conv2d(1, 2, 3), torch.nn.Linear(8, 4)
        linear(convolution(torch.randn(8, 1, 4, 4)).flatten(1)).sum().backward()
    assert watched(tmp_path, source).flops_by_dtype == {"fp32": counter.get_total_flops()}


def test_the_peak_covers_what_was_there_and_what_came(tmp_path: Path) -> None:
    source = loop("pass", before="large = torch.zeros(1 << 20)").replace(
        "optimizer.zero_grad()", "optimizer.zero_grad(); torch.zeros(1 << 18).add_(1)"
    )
    peak = watched(tmp_path, source).peak_bytes
    assert peak is not None and peak > 4 * ((1 << 20) + (1 << 18))


def test_too_few_steps_conclude_nothing(tmp_path: Path) -> None:
    recorder = MemoryRecorder(UserCode(str(tmp_path)), "cpu")
    kept = []
    recorder.start()
    for _ in range(2):
        kept.append(torch.ones(3, requires_grad=True) * 2)
        recorder.step_end()
    memory = recorder.stop()
    assert (memory.num_steps, memory.growth, memory.graphs, len(kept)) == (2, (), (), 2)


class OwnMode(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_the_mode_goes_below_the_jobs_own_and_is_taken_off_by_identity() -> None:
    recorder = MemoryRecorder(UserCode("."), "cpu")
    with OwnMode() as outer:
        recorder.start()
        stack = _get_current_dispatch_mode_stack()
        assert stack[-1] is outer and len(stack) == 2
        with OwnMode():
            torch.ones(3)
        assert _get_current_dispatch_mode_stack()[-1] is outer
        recorder.stop()
        assert _get_current_dispatch_mode_stack() == [outer]
    assert _get_current_dispatch_mode_stack() == []


def test_a_mode_the_job_entered_stays_when_watching_ends() -> None:
    recorder = MemoryRecorder(UserCode("."), "cpu")
    recorder.start()
    with OwnMode() as own:
        recorder.stop()
        assert _get_current_dispatch_mode_stack() == [own]
    assert _get_current_dispatch_mode_stack() == []


def test_watching_does_not_import_the_compiler(tmp_path: Path) -> None:
    program = """
        import sys, torch
        from flatout.measure.lines.live_memory import MemoryRecorder
        from flatout.measure.user_code import UserCode
        recorder = MemoryRecorder(UserCode("."), "cpu")
        recorder.start()
        torch.ones(3, requires_grad=True).sin().sum().backward()
        recorder.step_end()
        recorder.stop()
        assert "torch._dynamo" not in sys.modules
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
