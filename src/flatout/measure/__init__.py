"""Run a job and observe it: everything measured becomes one Evidence document.

evidence, evidence_file   what was measured of one job, and the file that stores it
run/                      the job in a child process, its steps, the plan of a diagnosis, several ranks
clock, phases             time per phase of a step, on the host's clock and on the GPU's
arms/                     ways to run a step differently; each proves one cause
loading/                  the data path: waits, workers, collates, ragged samples
lines/                    which lines of the user's code create, read, copy, keep and call
process/                  apart from the steps: compilation, garbage collection, threads, training health
device/                   kernels and operators, recorded by torch's profiler
batches                   a batch as a structure: walk it, serve it again, cut it in half
statistics                speed-ups with their uncertainty, from interleaved blocks
user_code, patches        who owns a line of code; reversible patches in the job's process

Importing this package imports no torch.
"""

from __future__ import annotations

from typing import Literal

Phase = Literal["wait", "transfer", "forward", "backward", "optimizer", "rest"]
PHASES: tuple[Phase, ...] = ("wait", "transfer", "forward", "backward", "optimizer", "rest")  # as shown

__all__ = ["PHASES", "Phase"]
