"""An arm that the product does not have: compiled steps, planned by inductor itself.

    python benchmarks/memory/inductor_plan.py --save        # anywhere, some minutes

The product traces a compiled model eagerly and says so.  Here its graphs are made by dynamo, AOTAutograd and
inductor as for a run, on tensors without data: AOTAutograd's partition says what is saved for the backward,
inductor's scheduler what is fused, and its wrapper code which buffers are made, reused and dropped.  Only the
kernels are left out.  The wrapper runs under the trace, which sees its buffers as it sees any tensor.

Inductor plans for the CPU here, with choices that it makes for CPUs alone switched off; whether it would fuse
the same for a GPU is what measuring the set `compiled` shows.  A model whose graph breaks has no answer.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

sys.path[0] = str(Path(__file__).resolve().parents[2])
from benchmarks.memory import estimates  # noqa: E402
from benchmarks.memory.children import Pool, Task  # noqa: E402
from benchmarks.memory.configuration import Configuration  # noqa: E402
from benchmarks.memory.configurations import SETS  # noqa: E402
from benchmarks.memory.first_look import HARDWARE, save, shown, without_places  # noqa: E402
from benchmarks.memory.preparation import import_everything  # noqa: E402

SET = "compiled"
HOPPER, MULTIPROCESSORS = (9, 0), 132
HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_forward_hooks_always_called")


class CompiledModels:
    """Runs the compiled modules of a model by inductor's plan."""

    def __init__(self, modes: tuple[Any, ...]) -> None:
        self.modes = modes

    def plan(self, model: nn.Module) -> None:
        from torch._dynamo.eval_frame import OptimizedModule

        for each in list(model.modules()):
            place: Any = each
            if isinstance(each, OptimizedModule):
                place.forward = self._runner(each._orig_mod)
            elif each._compiled_call_impl is not None:
                place._compiled_call_impl = self._runner(each)

    def _runner(self, module: nn.Module) -> Callable[..., Any]:
        target: Any = _Called(module)
        compiled = torch.compile(target, backend=self._backend, fullgraph=True, dynamic=False)

        def run(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes(), _as_in_a_run():
                return compiled(*args, **kwargs)

        return run

    def _backend(self, graph: Any, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(graph, inputs, inner_compile=self._compile)

    def _compile(self, graph: Any, inputs: Any, **options: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx_inner

        made: Any = compile_fx_inner(graph, inputs, **options)

        def run(args: Any) -> Any:
            with self._modes():
                return made(args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    @contextmanager
    def _modes(self) -> Iterator[None]:
        if any(mode is self.modes[-1] for mode in _get_current_dispatch_mode_stack()):
            yield
            return
        with self.modes[0], self.modes[1]:
            yield


class _Called:
    """A module's own forward with its hooks, as a plain callable."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module._call_impl(*args, **kwargs)


@contextmanager
def _as_in_a_run() -> Iterator[None]:
    """Without the trace's own hooks, which dynamo would compile as well."""
    places: Any = modules
    kept = {name: dict(getattr(places, name)) for name in HOOKS}
    for name in HOOKS:
        getattr(places, name).clear()
    try:
        with torch.compiler.set_stance("default"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, hooks in kept.items():
            getattr(places, name).update(hooks)


def leave_kernels_out() -> None:
    """Let wrappers make their buffers where a trace sees them, and call nothing; for good in this process."""
    import torch._inductor.async_compile
    import torch._inductor.compile_fx
    import torch._inductor.ir

    guards: Any = torch._C._dynamo.guards
    guards._reinterpret_tensor = lambda tensor, size, stride, offset=0: torch.as_strided(
        tensor, size, stride, tensor.storage_offset() + offset
    )
    guards._empty_strided_cpu = lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype)
    for name in ("assert_size_stride", "assert_alignment"):
        setattr(guards, name, lambda *args, **kwargs: None)
    compiler: Any = torch._inductor.async_compile.AsyncCompile
    compiler.cpp_pybinding = compiler.cpp = lambda self, *args, **kwargs: _nothing
    config: Any = torch._inductor.config
    config.fx_graph_cache = False
    lowering: Any = torch._inductor.ir
    lowering.is_cpu = lambda x: False
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def planned(configuration: Configuration) -> dict[str, Any]:
    """Peaks of the compiled step; for a child, whose process it changes."""
    from flatout.memory.cuda import rules
    from flatout.memory.cuda.workspaces import Workspaces
    from flatout.memory.predict.estimate import estimate
    from flatout.memory.trace import tracer

    rules.install(compute_capability=HOPPER)
    leave_kernels_out()
    places: Any = tracer
    make_parts = places.make_parts

    def make_planned_parts(*args: Any, **kwargs: Any) -> Any:
        parts = make_parts(*args, **kwargs)
        CompiledModels(tuple(_get_current_dispatch_mode_stack()[-2:])).plan(parts.model)
        return parts

    places.make_parts = make_planned_parts
    workspaces = Workspaces(compute_capability=HOPPER, num_multiprocessors=MULTIPROCESSORS)
    found = estimate(tracer.trace_job(configuration.job, configuration.recipe, workspaces=workspaces))
    return {"allocated": found.peak_allocated_bytes, "reserved": found.peak_reserved_bytes}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=2, help="plans at a time")
    parser.add_argument("--only", default="", help="configurations whose label contains this")
    parser.add_argument("--seconds", type=float, default=1800, help="start nothing after this long")
    parser.add_argument("--save", action="store_true", help="write it to results/")
    arguments = parser.parse_args()
    import_everything()
    chosen = [each for each in SETS[SET]() if arguments.only in each.label]
    tasks: list[Task] = [(each.label, planned, (each,)) for each in chosen]
    found: dict[str, dict[str, Any]] = {}
    with Pool(width=arguments.width, limit_s=300) as pool:
        for label, answer in pool.run(tasks, deadline=time.monotonic() + arguments.seconds):
            found[label] = without_places(answer)
            print(f"{label:<76} {shown(answer)}", flush=True)
    if arguments.save:
        rows = [
            {"label": each.label, "family": each.family, **found[each.label]}
            for each in chosen
            if each.label in found
        ]
        head = {"benchmark": "memory", "hardware": HARDWARE, "estimated_with": estimates.versions()}
        save("compiled-inductor-plan", {**head, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
