"""Flatout finds out why a PyTorch job wastes its GPU, and proves it by measurement.

    import flatout

    diagnosis = flatout.diagnose(step, loader)    # run a training loop and examine it
    print(flatout.plan(model, batch, device="A100-80GB"))    # predict the memory of a step, without a GPU
    print(flatout.fit(model, batch, device="A100-80GB"))     # the largest batch that trains there
    for batch in flatout.watch(loader): ...       # show how the job runs, and keep a log
    flatout.step()                                # mark the end of a step of a loop without an optimizer
    flatout.evolve({"model": folder, "task": "arithmetic"})     # train by evolution strategies
    flatout.adapt(Path("five.yaml"))              # train adapters for several tasks, and their router
    flatout.steer({"model": folder, "questions": "syc.jsonl"})  # search for a steering vector and test it

Names are resolved on first use: `import flatout` costs a training script nothing, and torch is imported
by the verb that needs it.

The rooms, each of which imports only from those below it:

cli, api                                  commands, and the one function behind each
adapters, evolution, steering, testing    the names that programs and plug-ins of your own import
tuner, planner, monitor, engines          what makes, fits, watches and runs jobs
doctor                                    from evidence to findings
memory, multiplex, data                   bytes of a step; many variants in one batch; batches
measure                                   a job that is run and watched
hardware, page                            facts of devices; one look for every page and picture
ground                                    errors, units, files: what every room stands on
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatout.ground.lazy_names import lazy_names as _lazy_names

if TYPE_CHECKING:
    from flatout.api import adapt as adapt
    from flatout.api import diagnose as diagnose
    from flatout.api import evolve as evolve
    from flatout.api import fit as fit
    from flatout.api import plan as plan
    from flatout.api import steer as steer
    from flatout.doctor.examine import Diagnosis as Diagnosis
    from flatout.doctor.finding import Finding as Finding
    from flatout.ground.decisions import Decision as Decision
    from flatout.ground.errors import FlatoutError as FlatoutError
    from flatout.measure.evidence import Evidence as Evidence
    from flatout.measure.evidence_file import load_evidence as load_evidence
    from flatout.measure.run.steps import step as step
    from flatout.memory.predict.estimate import MemoryEstimate as MemoryEstimate
    from flatout.monitor.job.watch import watch as watch
    from flatout.planner.fit.fit_job import JobFit as JobFit
else:
    __all__, __getattr__, __dir__ = _lazy_names(__name__)
    __all__ += ["__version__"]

__version__ = "0.1.0"
