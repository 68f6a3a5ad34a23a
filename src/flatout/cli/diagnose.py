"""`flatout diagnose`: run a job, or read a saved Evidence file, and say why it is slow; `flatout rules`.

Whatever follows the script belongs to the script, options included.  Everything that can be checked without
running is checked first: a mistyped file name must not cost a measurement of a minute.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flatout.cli import flags
from flatout.cli.flags import flag, switch
from flatout.cli.output import FINDINGS, plain_console, print_document, print_json, say, say_written
from flatout.doctor.sentences import too_little
from flatout.ground.errors import BadInput, FlatoutError
from flatout.ground.torchrun import read_launch

if TYPE_CHECKING:
    from flatout.doctor.examine import Diagnosis


def diagnose(
    command: flags.Command = None,
    module: flags.Module = False,
    evidence: Annotated[
        Path | None, flag("--evidence", "FILE", "Diagnose a saved Evidence file instead of running a job.")
    ] = None,
    save: Annotated[
        Path | None, flag("--save", "FILE", "Save the Evidence here; default: a file in .flatout/.")
    ] = None,
    html: flags.Html = None,
    json_output: flags.Json = False,
    keep_running: Annotated[
        bool, switch("--keep-running", "Let the job finish after the measurement, and exit with its code.")
    ] = False,
    seconds: Annotated[
        float, flag("--seconds", "N", "Limit the diagnosis to N seconds, imports included.")
    ] = 60.0,
) -> None:
    """Run an unmodified training script and say why it is slow.

    Flatout runs the job for a few dozen steps and then ends it. It times some steps, traces some, and runs
    some without a suspected cause. Every finding names a line and how much faster the step gets without that
    cause. Flatout's options go before the script; everything after it belongs to the script. With --json, the
    script's output goes to stderr.

    \b
    Examples:
      flatout diagnose train.py --epochs 3
      flatout diagnose --html report.html -m pkg.train --lr 1e-3
      flatout diagnose --json --seconds 30 train.py > diagnosis.json
      flatout diagnose --evidence evidence.json

    Exit codes: 0 no findings, 1 findings, 2 flatout could not do its work or measured too little to find
    any, 130 interrupted (measurements so far are kept). If the script itself fails after its first steps,
    flatout exits with its code.
    """
    _check_options(command, evidence=evidence, save=save, keep_running=keep_running, seconds=seconds)
    flags.check_html(html)
    import flatout.api as api

    launch = read_launch()
    if evidence is not None:
        diagnosis = api.diagnose_evidence(evidence)
    else:
        assert command
        diagnosis = api.diagnose_script(
            command,
            module=module,
            keep_running=keep_running,
            evidence_path=save,
            seconds=seconds,
            on_progress=say if launch.is_first else lambda message: None,
            script_stdout_to_stderr=json_output,
        )
    if evidence is not None or launch.is_first:  # of several processes of one job the first speaks for all
        _answer(diagnosis, html=html, json_output=json_output, ran=evidence is None)
    launched = evidence is None and launch.num_ranks > 1
    raise typer.Exit(exit_code(diagnosis, keep_running=keep_running, launched=launched))


def exit_code(diagnosis: Diagnosis, *, keep_running: bool = False, launched: bool = False) -> int:
    """Return the script's own exit code if it counts, else 1 with findings, 2 if too little was measured.

    A launcher of several processes takes every code but 0 for a crash and ends the others.
    """
    own_code = diagnosis.script_exit_code
    if own_code or (keep_running and own_code is not None):
        return own_code
    if launched:
        return 0
    if diagnosis.findings:
        return FINDINGS
    return FlatoutError.exit_code if too_little(diagnosis.evidence) is not None else 0


def _check_options(
    command: Sequence[str] | None,
    *,
    evidence: Path | None,
    save: Path | None,
    keep_running: bool,
    seconds: float,
) -> None:
    if evidence is None and not command:
        raise BadInput("nothing to diagnose", hint="give a script, -m MODULE or --evidence FILE")
    if evidence is not None and (command or save or keep_running):
        other = command[0] if command else "--save" if save else "--keep-running"
        raise BadInput(f"--evidence reads a saved run, so {other} has no effect", hint="omit one of them")
    if not (seconds > 0 and math.isfinite(seconds)):
        raise BadInput(f"--seconds {seconds:g} is not a positive number", hint="give a time such as 60")


def _answer(diagnosis: Diagnosis, *, html: Path | None, json_output: bool, ran: bool) -> None:
    """Write the page first, so that a reader who leaves stdout early does not lose it."""
    if html is not None:
        from flatout.api import write_diagnosis

        write_diagnosis(diagnosis, html)
        say_written(html)
    if json_output:
        print_json(diagnosis.to_json())
        if ran and diagnosis.evidence_path is not None:
            say(f"Evidence is in {diagnosis.evidence_path}")
    else:
        from flatout.cli.render.diagnosis import render

        sys.stdout.write(render(diagnosis))


def rules(
    code: Annotated[
        str | None,
        typer.Argument(
            metavar="CODE", help="A code (FO301) or a name (tensor-created-in-loop).", show_default=False
        ),
    ] = None,
    json_output: flags.Json = False,
) -> None:
    """List the rules, or explain one.

    \b
    Examples:
      flatout rules
      flatout rules FO301
    """
    from flatout.doctor.rule import all_rules, families, rule_by_code

    chosen = all_rules() if code is None else (rule_by_code(code),)
    if json_output:
        fields = ("code", "name", "summary", "arms", "tune", "sections")
        listed = [{field: getattr(rule, field) for field in fields} for rule in chosen]
        print_document("flatout-rules", rules=listed)
        return
    if code is None:
        width = max(len(rule.name) for rule in chosen)
        for family, members in families(chosen).items():
            typer.echo(family)
            for rule in members:
                typer.echo(f"  {rule.code}  {rule.name:<{width}}  {rule.summary.replace('`', '')}")
        return
    from rich.markdown import Markdown

    from flatout.doctor.rules_page import sections_markdown, speaks

    (rule,) = chosen
    proved = f"\n\nProved by: {', '.join(rule.arms)}. Reported {speaks(rule)}." if rule.arms else ""
    proved += f"\n\nflatout tune can try it: {', '.join(rule.tune)}." if rule.tune else ""
    plain_console().print(
        Markdown(f"# {rule.code} {rule.name}\n\n{sections_markdown(rule, level=2)}{proved}")
    )
