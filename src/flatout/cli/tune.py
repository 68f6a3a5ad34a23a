"""`flatout tune`: find what makes an unmodified script faster, and prove it; `flatout run`: run it so.

Options of flatout go before the script; everything after it belongs to the script.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from flatout.cli import flags
from flatout.cli.flags import flag, switch
from flatout.cli.output import plain_console, plain_table, print_document, say
from flatout.ground.errors import BadInput
from flatout.ground.units import UNKNOWN, show_ratio

if TYPE_CHECKING:
    from flatout.tuner.tune import Tuning
    from flatout.tuner.verdict import Gain

DEFAULT = Path("flatout.toml")


def tune(
    command: flags.Command = None,
    module: flags.Module = False,
    out: Annotated[Path, flag("--to", "FILE", "Where to write what is kept.")] = DEFAULT,
    evidence: Annotated[
        Path | None, flag("--evidence", "FILE", "Evidence of this very command; default: diagnose it first.")
    ] = None,
    allow_lossy: Annotated[
        bool, switch("--allow-lossy", "Also try what changes the numbers, and judge it by the losses.")
    ] = False,
    only: Annotated[
        list[str] | None, flag("--only", "NAME[=VALUE]", "Try this treatment alone; repeatable.")
    ] = None,
    html: flags.Html = None,
    json_output: flags.Json = False,
) -> None:
    """Try what makes an unmodified training script faster, prove it, and keep what pays.

    The script is diagnosed, then run some dozens of times for some dozens of steps, with and without each
    treatment in turn, in alternating processes. A treatment is kept when the lower end of its gain lies above
    1.03 and when its losses and gradients are those of the script. What the script writes during trials goes
    to a temporary folder. What is kept stands in FILE, which `flatout run` reads.

    \b
    Examples:
      flatout tune train.py --epochs 3
      flatout tune --html tuning.html train.py --epochs 3
      flatout tune --allow-lossy --to a100.toml -m pkg.train --lr 1e-3
      flatout run train.py --epochs 3

    Exit codes: 0 done, 2 flatout could not do its work, 130 interrupted.
    """
    import flatout.api as api

    if not command:
        raise BadInput("no script given", hint="flatout tune train.py ARGS…")
    done = api.tune_script(
        command,
        module=module,
        allow_lossy=allow_lossy,
        only=only or (),
        evidence=evidence,
        on_progress=say,
    )
    if done.prescription.treatments:
        api.save_tuning(done, out)
    if html is not None:
        api.write_tuning(done, html)
        say(f"the report is in {html}")
    if json_output:
        print_document("flatout-tuning", done)
        return
    _show(done, out)


def run(
    command: flags.Command = None,
    module: flags.Module = False,
    prescription: Annotated[
        Path | None, flag("--with", "FILE", "What flatout tune wrote; default: flatout.toml.")
    ] = None,
) -> None:
    """Run an unmodified script under what `flatout tune` kept for it.

    The process becomes the script's: its output, signals and exit code are its own.

    \b
    Examples:
      flatout run train.py --epochs 3
      flatout run --with a100.toml -m pkg.train --lr 1e-3
    """
    import flatout.api as api

    if not command:
        raise BadInput("no script given", hint="flatout run train.py ARGS…")
    api.run_tuned(command, module=module, prescription=prescription)


def _show(done: Tuning, out: Path) -> None:
    table = plain_table("treatment", "answer", "gain", "why")
    for each in done.tried:
        name = each.name if each.value is True else f"{each.name} {each.value}"
        table.add_row(name, each.answer, _show_gain(each.gain), each.reason)
    console = plain_console()
    console.print(table)
    noise = f"{show_ratio(done.noise.low)} to {show_ratio(done.noise.high)}"
    console.print(f"The job against itself: {noise} over {done.noise.num_pairs} pairs of runs.")
    if done.total is None:
        console.print("Nothing pays: the script runs as fast as these treatments can make it.")
        return
    console.print(
        f"All that is kept: {_show_gain(done.total)} faster. Run it so: flatout run; kept in {out}."
    )


def _show_gain(gain: Gain | None) -> str:
    if gain is None:
        return UNKNOWN
    low, high = (f"{value:.2f}" for value in (gain.low, gain.high))
    return f"{show_ratio(gain.ratio)} [{low}, {high}]"
