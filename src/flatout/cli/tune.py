"""`flatout tune` finds and proves what makes a script faster, `run` applies it, `check` guards it.

Options of flatout go before the script; everything after it belongs to the script.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flatout.cli import flags
from flatout.cli.flags import flag, switch
from flatout.cli.output import FINDINGS, plain_console, plain_table, print_document, say, say_written
from flatout.cli.render.progress import live_line
from flatout.ground.errors import BadInput
from flatout.ground.units import UNKNOWN, show_interval, show_ratio, show_share

if TYPE_CHECKING:
    from flatout.tuner.check.check import Checked
    from flatout.tuner.results.outcome import Tuning
    from flatout.tuner.verdict import Gain, JobGain

DEFAULT = Path("flatout.toml")
FEWEST_PAIRS = 4  # of a check
CHECK_CODES = {"ok": 0, "slower": FINDINGS, "cannot tell": 3}
SLOW_START_S = 1.0
LEAST_GAIN = 1.03
FEWEST_NOISE_PAIRS = 3  # an interval over two spans everything


def tune(
    command: flags.Command = None,
    module: flags.Module = False,
    out: Annotated[Path, flag("--to", "FILE", "Write what is kept to this file.")] = DEFAULT,
    evidence: Annotated[
        Path | None,
        flag("--evidence", "FILE", "Use saved Evidence of the same command; default: diagnose first."),
    ] = None,
    allow_lossy: Annotated[
        bool, switch("--allow-lossy", "Also try changes that alter the numbers; judge them by the losses.")
    ] = False,
    only: Annotated[
        list[str] | None, flag("--only", "NAME[=VALUE]", "Try this treatment alone; repeatable.")
    ] = None,
    patch: Annotated[
        bool, switch("--patch", "Also try changes to the source, and show the kept ones as a diff.")
    ] = False,
    apply: Annotated[
        bool, switch("--apply", "Write kept patches into the files; without a script, those in FILE.")
    ] = False,
    undo: Annotated[bool, switch("--undo", "Restore the files that --apply last wrote.")] = False,
    resume: flags.Resume = False,
    ranks: Annotated[int, flag("--ranks", "N", "Run N processes that train together on this machine.")] = 1,
    ray: Annotated[
        str | None, flag("--ray", "ADDRESS", "Run trials on a Ray cluster: auto or HOST:PORT.")
    ] = None,
    minutes: Annotated[
        float | None, flag("--minutes", "M", "End within M minutes, diagnosis and final runs included.")
    ] = None,
    html: flags.Html = None,
    json_output: flags.Json = False,
) -> None:
    """Try changes that make a script faster, and keep what is proven.

    The script itself stays unchanged.  Flatout diagnoses it, then runs it with and without each treatment,
    dozens of times for dozens of steps: in alternating blocks of one run if the treatment can be switched,
    otherwise in alternating processes. It keeps a treatment if the lower end of its gain lies above 1.03 and
    the losses and gradients match those of the script. What the script writes meanwhile goes to a temporary
    folder. `flatout run` reads the result from FILE.

    With --patch, Flatout also rewrites the source, in memory: it tries a patched file like a treatment and
    shows what it keeps as a diff. Only --apply writes to your files, after a backup.

    With --minutes, the diagnosis gets a quarter of the time at most, and no trial starts that would end too
    late, judged by the longest so far. Time for the final runs with everything kept is set aside; a trial
    that reaches into it is ended. Only the diagnosis and two pairs of unchanged runs always run to their end.

    With --ray, trials of several treatments run at once, on nodes with the same hardware, both arms of a pair
    on one node. Trials of a lost node run again on another; --resume continues with every finished trial.

    \b
    Examples:
      flatout tune train.py --epochs 3
      flatout tune --html tuning.html train.py --epochs 3
      flatout tune --patch train.py --epochs 3
      flatout tune --apply
      flatout tune --undo
      flatout tune --ranks 2 train.py
      flatout tune --ray auto train.py --epochs 3
      ray job submit -- env -C /shared/project flatout tune --ray auto train.py --epochs 3
      flatout tune --allow-lossy --to a100.toml -m pkg.train --lr 1e-3
      flatout run train.py --epochs 3

    Exit codes: 0 done, 2 flatout could not do its work, 130 interrupted.
    """
    import flatout.api as api

    if undo:
        _say_files("restored", api.undo_patches(out))
        return
    if not command and apply:
        _say_files("wrote", api.apply_patches(out))
        return
    flags.check_html(html)
    flags.check_output(out, flag="--to", name=DEFAULT.name)
    try:
        with live_line() as (update, _):
            done = api.tune_script(
                command or (),
                module=module,
                allow_lossy=allow_lossy,
                only=only or (),
                patch=patch or apply,
                evidence=evidence,
                resume=resume,
                ranks=ranks,
                ray=ray,
                minutes=minutes,
                on_progress=update,
            )
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted: flatout tune --resume continues from here") from None
    if json_output:
        print_document("flatout-tuning", done)
    else:
        _show(
            done, out, module=module, ranks=ranks
        )  # before files are written, for which there may be no room
    if done.prescription.treatments or done.prescription.patches:
        api.save_tuning(done, out)
    if html is not None:
        api.write_tuning(done, html)
        say_written(html)
    if apply and done.prescription.patches:
        _say_files("wrote", api.apply_patches(out))


def _say_files(what: str, paths: list[Path]) -> None:
    files = ", ".join(str(path) for path in paths)
    say(f"{what} {files}" + ("; flatout tune --undo reverts it" if what == "wrote" else ""))


def run(
    command: flags.Command = None,
    module: flags.Module = False,
    prescription: Annotated[
        Path | None, flag("--with", "FILE", "Apply this file of flatout tune; default: flatout.toml.")
    ] = None,
) -> None:
    """Run an unmodified script with what `flatout tune` kept for it.

    The process becomes the script: output, signals and exit code are the script's own.

    \b
    Examples:
      flatout run train.py --epochs 3
      flatout run --with a100.toml -m pkg.train --lr 1e-3
    """
    import flatout.api as api

    api.run_tuned(command or (), module=module, prescription=prescription)


def check(
    ctx: typer.Context,
    command: flags.Command = None,
    module: flags.Module = False,
    base: Annotated[
        str | None, flag("--base", "REF", "Compare with a git revision, or a folder with another checkout.")
    ] = None,
    against: Annotated[
        Path | None,
        flag("--against", "FILE", "Compare with a result of --json from any machine, or a flatout.toml."),
    ] = None,
    tolerance: Annotated[
        float, flag("--tolerance", "X", "Accept steps that are slower by up to this share.")
    ] = 0.05,
    pairs: Annotated[int, flag("--pairs", "N", "Run at most N pairs.")] = 8,
    json_output: flags.Json = False,
) -> None:
    """Say whether this version of the code is slower than another.

    Base and head run in turn, in one job on one machine, for dozens of steps each, until the answer is clear.
    Flatout also counts launches, waits, copied bytes, memory, parameter groups and graph breaks, which are
    the same on every machine. --against a result of --json compares only these counts; --against a
    flatout.toml checks that its treatments still gain what was proven.

    \b
    Examples:
      flatout check --base main train.py --epochs 1
      flatout check --base main --json train.py > check.json
      flatout check --against check.json train.py
      flatout check --against flatout.toml train.py

    Exit codes: 0 ok, 1 slower, 3 cannot tell, 2 flatout could not do its work, 130 interrupted.
    """
    import flatout.api as api

    if not command:
        raise BadInput("no script given", hint="flatout check --base REF train.py ARGS…")
    if not 0 <= tolerance < 1 or pairs < FEWEST_PAIRS:
        raise BadInput(
            f"--tolerance {tolerance:g} or --pairs {pairs} is out of range",
            hint=f"a tolerance is a share, such as 0.05; at least {FEWEST_PAIRS} pairs are needed",
        )
    given = flags.collect(ctx, apart=["command", "against"])
    done = api.check_script(command, **given, against=against, on_progress=say)
    if json_output:
        print_document("flatout-check", done)
    else:
        _show_check(done)
    raise typer.Exit(CHECK_CODES[done.answer])


def _show_check(done: Checked) -> None:
    console = plain_console()
    console.print(f"{done.answer}: {done.reason}.")
    if done.smallest is not None:
        runs = f"{done.num_runs} runs"
        console.print(f"The smallest change that {runs} could show here: {show_share(done.smallest)}.")
    if done.same_losses is not None:
        console.print("The losses equal base's." if done.same_losses else "The losses differ from base's.")
    for change in done.changes:
        console.print(f"  {change}")
    if not done.changes and done.base_counts and done.head_counts:
        console.print("All counts are equal: launches, waits, bytes, memory, groups, graph breaks.")


def _show(done: Tuning, out: Path, *, module: bool = False, ranks: int = 1) -> None:
    table = plain_table("treatment", "answer", "gain", "why")
    for each in sorted(done.tried, key=lambda each: each.answer != "kept"):
        table.add_row(
            str(each),
            each.answer,
            _show_gain(each.gain),
            each.reason + (_show_start(each.job) if each.answer == "kept" else ""),
        )
    console = plain_console()
    console.print(table)
    noise = f"{show_ratio(done.noise.low)} to {show_ratio(done.noise.high)} over"
    if done.noise.num_pairs < FEWEST_NOISE_PAIRS:
        noise = "there was time for only"
    smallest = f"the smallest gain they can show here is {show_ratio(done.smallest_gain or LEAST_GAIN)}"
    console.print(f"The job against itself: {noise} {done.noise.num_pairs} pairs of runs; {smallest}.")
    if done.noise_in_run is not None:
        inside = f"{show_ratio(done.noise_in_run.low)} to {show_ratio(done.noise_in_run.high)}"
        console.print(f"Blocks of one run against themselves: {inside}.")
    console.print(done.say_repeats())
    if done.total is None:
        console.print(done.why_nothing())
        return
    console.print(f"Everything kept, together: {_show_gain(done.total)} faster. It is in {out}.")
    if done.job is not None and done.job.ratio is not None:
        epoch = f"one epoch of {done.job.num_steps} steps"
        console.print(f"With start-up, {epoch} is {show_ratio(done.job.ratio)} as fast.")
    if done.prescription.treatments:
        elsewhere = [] if out == DEFAULT else ["--with", str(out)]
        flatout = ["flatout"]
        if ranks > 1:
            flatout = ["torchrun", "--nproc-per-node", str(ranks), "-m", "flatout"]
        again = [*flatout, "run", *elsewhere, *(["-m"] if module else []), *done.prescription.command]
        console.print(f"Run it: {shlex.join(again)}", markup=False, highlight=False, soft_wrap=True)
    if done.diff:
        console.print("The proven change to the source; flatout tune --apply writes it:\n")
        console.print(done.diff, markup=False, highlight=False, soft_wrap=True)


def _show_start(job: JobGain | None) -> str:
    if job is None or not job.pays_after or job.extra_s < SLOW_START_S:
        return ""
    return f"; it costs {job.extra_s:.1f} s at the start and pays off after {job.pays_after} steps"


def _show_gain(gain: Gain | None) -> str:
    return UNKNOWN if gain is None else f"{show_ratio(gain.ratio)} {show_interval(gain.low, gain.high)}"
