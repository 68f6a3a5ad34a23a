"""How good is the doctor, and how good are others?  One table over all scripts whose faults are known.

    python benchmarks/diagnosis/scoreboard.py [--only RULE,RULE] [--peers] [--replay] [--save]

Live runs of every script of tests/planted on this machine, then the real gain of each pair (`twins`), then
with `--peers` other tools on the same scripts (`peers`), then the table; what was recorded on other devices
is replayed.  All that was measured lies in `--state DIR`: an interrupted run goes on where it was, a script
that changed is run again, and `--replay` judges anew by the present rules.
`--peers-alone` runs the others and nothing else: on another machine, for `results/peers_DEVICE.json`, or with
`--save` for the latest table of this one, whose own rows stay.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests" / "planted")]
import score  # noqa: E402
from fixes import PLANTED, ROOT  # noqa: E402
from peers import PATTERNS, STATES, TRACEML, CannotRun, Said, peers  # noqa: E402
from run import (  # noqa: E402
    WITHOUT_CEILING,
    Pair,
    has_guilty_line,
    known_gains,
    note_gain,
    read,
    save,
    workers_of,
)
from score import Case, Score  # noqa: E402
from table import print_board  # noqa: E402

from flatout.doctor.examine import examine  # noqa: E402
from flatout.doctor.rule import all_rules  # noqa: E402
from flatout.measure.evidence_file import load_evidence  # noqa: E402

RESULTS = HERE / "results"
STATE = ROOT / ".flatout" / "scoreboard"
CODES = {rule.name: rule.code for rule in all_rules()}


# Measuring


def recorded(case: Case, state: Path) -> Case:
    """The case as it was run here, or itself when it was not yet, or with another text of the script."""
    for path in sorted((state / case.rule / "evidence").glob(f"{case.script.stem}_*.json.gz")):
        found = replace(case, recording=path)
        if path.stem.rpartition("_")[0] == case.script.stem and score.run(found).error is None:
            return found
    return case


def diagnose(cases: Sequence[Case], state: Path, *, together: int) -> None:
    """Run what was not run yet; its evidence is kept, or why there is none.

    A script whose ceiling is held against a real gain has the machine to itself, as both scripts of the pair
    have it: beside another one, work that waits for memory slows down more than the rest of a step.
    """
    missing = [case for case in cases if recorded(case, state).recording is None]
    number = 0
    for is_held_against_gain in (True, False):
        score.TOGETHER = 1 if is_held_against_gain else together
        chosen = [case for case in missing if _has_gain(case) == is_held_against_gain]
        for case, judged in _each(chosen, lambda case: score.run(case, record=state)):
            number += 1
            _say(f"{number} of {len(missing)}: {case.name}: {'; '.join(judged.faults) or 'right'}")
            _note(state / "errors.json", _key(case), judged.error)


def _has_gain(case: Case) -> bool:
    return case.script.stem == "planted" and case.rule not in WITHOUT_CEILING


def measure_gains(cases: Sequence[Case], state: Path) -> None:
    """Let each planted script and its mended form take turns, with the machine to themselves."""
    for case in cases:
        found = recorded(case, state)
        if not _has_gain(case) or found.recording is None:
            continue
        evidence = load_evidence(found.recording)
        device = score.slug(evidence)
        if case.rule in known_gains(state / f"gains_{device}.json"):
            continue
        if not has_guilty_line(case.rule, evidence.job.device):
            continue
        try:
            with Pair(case.rule) as pair:
                gain = pair.gain(workers=workers_of(case.rule, examine(evidence), evidence))
        except Exception as error:  # noqa: BLE001 - one pair that fails does not cost the others
            _say(f"{case.rule}: no gain: {error}")
            continue
        note_gain(state, device, case.rule, gain)
        _say(f"{case.rule}: mended {gain.gain:.2f} [{gain.low:.2f}, {gain.high:.2f}] times as fast")


def ask_peers(cases: Sequence[Case], state: Path) -> None:
    """Run the others on each script; what they said is kept, or why they said nothing."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    path = state / f"peers_{name.lower().removeprefix('nvidia ').replace(' ', '-')}.json"
    for peer, (version, ask) in peers().items():
        if isinstance(ask, str):
            _note(path, peer, {"version": version, "cannot": ask, "cases": {}})
            continue
        known = _load(path).get(peer, {}).get("cases", {})
        known = {key: answer for key, answer in known.items() if answer["text"] == _text_of(key)}
        missing = [case for case in cases if _key(case) not in known]

        def answer_of(case: Case, ask: Callable[[Path], Said] = ask) -> dict[str, Any]:
            text = _text_of(_key(case))
            try:
                return {"text": text, "said": ask(case.script)}
            except CannotRun as error:
                return {"text": text, "said": [], "error": str(error)}

        for number, (case, answer) in enumerate(_each(missing, answer_of), 1):
            known[_key(case)] = answer
            _note(path, peer, {"version": version, "cases": known})
            _say(f"{number} of {len(missing)}: {peer}: {_key(case)}: {answer.get('error') or answer['said']}")


def _each(cases: Sequence[Case], work: Callable[[Case], Any]) -> Iterator[tuple[Case, Any]]:
    """(case, result) in their order; an interrupt leaves out those that have not begun."""
    futures = list(score.together(cases, work))
    try:
        for case, future in zip(cases, futures, strict=True):
            yield case, future.result()
    finally:
        for future in futures:
            future.cancel()


def _note(path: Path, key: str, value: Any) -> None:
    known = {**_load(path), key: value}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".new").write_text(
        json.dumps({name: value for name, value in known.items() if value}, indent=1) + "\n"
    )
    path.with_suffix(".new").replace(path)


def _load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _key(case: Case) -> str:
    return f"{case.rule}/{case.script.stem}"


def _text_of(key: str) -> str | None:
    path = PLANTED / f"{key}.py"
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12] if path.exists() else None


# Judging


def judge_peer(case: Case, said: Said, *, device: str, meanings: dict[str, tuple[str, ...]]) -> Score:
    """Compare categories with the marks of a script, in the peer's favour."""
    marks = [m for m in score.marks(case.script.read_text(), rule=case.rule) if m.holds_on(device)]
    required = [mark for mark in marks if mark.required]

    def covers(category: str, rule: str) -> bool:
        return CODES[rule].startswith(meanings[category])

    exact, inexact, missed = 0, list[str](), list[str]()
    for mark in required:
        lines = [line for category, line in said if covers(category, mark.rules[0])]
        where = f"{mark.rules[0]} at line {mark.line}"
        if mark.line in lines:
            exact += 1
        else:
            (inexact if lines else missed).append(where)
    spoken = dict.fromkeys(category for category, _line in said)
    right = [c for c in spoken if any(covers(c, rule) for mark in marks for rule in mark.rules)]
    wanted = [mark.rules[0] for mark in score.largest(marks)]
    is_first = bool(spoken) and any(covers(next(iter(spoken)), rule) for rule in wanted)
    return Score(
        case=case,
        device=device,
        expected=len(required),
        exact=exact,
        inexact=tuple(inexact),
        missed=tuple(missed),
        wrong=tuple(category for category in spoken if category not in (*right, *STATES)),
        first=None if is_first or not required else "another",
    )


def peers_on(path: Path, judged: Sequence[Score]) -> dict[str, Any]:
    """The others and Flatout on the scripts that all of them met on one device."""
    device = path.stem.removeprefix("peers_")
    ours = {_key(one.case): one for one in judged if one.case.name.endswith(f" {device}")}
    flatout = {"tool": "Flatout", "scripts": len(ours), **score.sums(list(ours.values()))}
    others = tools_on(path, {key: one.case for key, one in ours.items()})
    return {"device": device, "tools": [flatout, *others]}


def tools_on(path: Path, cases: dict[str, Case]) -> list[dict[str, Any]]:
    """The others on these scripts, where their answers are of the present text."""
    kind = "cpu" if path.stem == "peers_cpu" else "cuda"
    tools: list[dict[str, Any]] = []
    for peer, entry in _load(path).items():
        answers = {
            key: answer
            for key, answer in entry["cases"].items()
            if key in cases and answer["text"] == _text_of(key)
        }
        meanings = TRACEML if peer == "TraceML" else PATTERNS
        scores = [
            judge_peer(cases[key], [(c, line) for c, line in answer["said"]], device=kind, meanings=meanings)
            for key, answer in answers.items()
        ]
        errors = {key: answer["error"] for key, answer in answers.items() if "error" in answer}
        sums = score.sums(scores)
        if meanings is PATTERNS:
            sums["top-1 cause"] = "not ranked"
        tools.append({"tool": f"{peer} {entry['version']}".strip(), "scripts": len(scores), **sums})
        tools[-1] |= {"without_answer": errors, "cannot": entry.get("cannot")}
    return tools


def add_peers(saved: Path, state: Path, cases: Sequence[Case]) -> None:
    """Put what the others said into a saved table; what it says of Flatout and of further tools stays."""
    result = json.loads(saved.read_text())
    for path in sorted(state.glob("peers_*.json")):
        fresh = tools_on(path, {_key(case): case for case in cases})
        names = {tool["tool"].partition(" ")[0] for tool in fresh}
        for there in result["peers"]:
            if there["device"] == path.stem.removeprefix("peers_"):
                first, *others = there["tools"]
                kept = [tool for tool in others if tool["tool"].partition(" ")[0] not in names]
                there["tools"] = [first, *fresh, *kept]
    saved.write_text(json.dumps(result, indent=1) + "\n")


def by_rule(judged: Sequence[Score], ceilings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each rule: what it said anywhere, what it had to say, its clean twins, ceilings beside real gains."""
    counts: dict[str, Counter[str]] = {name: Counter() for name in CODES}
    for one in judged:
        _count(one, counts)
    rows = []
    for name, found in counts.items():
        gains = [
            {key: row[key] for key in ("real", "ceiling", "arm")} | {"device": result["device"]}
            for result in ceilings
            for row in result["rows"]
            if row["name"].partition(",")[0] == name
        ]
        if not found:
            continue
        num_found = found["expected"] - found["missed"]
        row: dict[str, Any] = {"code": CODES[name], "name": name}
        row |= {"right": [found["said"] - found["wrong"], found["said"]]}
        row |= {"found": [num_found, found["expected"]], "exact": [num_found - found["inexact"], num_found]}
        row |= {"first": [found["first"], found["largest"]], "clean": [found["silent"], found["clean"]]}
        rows.append(row | {"of_clean": found["of_clean"], "gains": gains})
    return sorted(rows, key=lambda row: str(row["code"]))


def _count(one: Score, counts: dict[str, Counter[str]]) -> None:
    marks = score.marks(one.case.script.read_text(), rule=one.case.rule)
    marks = [mark for mark in marks if mark.holds_on(one.device or "unknown")]
    required = [mark for mark in marks if mark.required]
    for mark in required:
        counts[mark.rules[0]]["expected"] += 1
    for name in {mark.rules[0] for mark in score.largest(marks)}:
        counts[name]["largest"] += 1
        counts[name]["first"] += one.first is None
    for what in ("missed", "inexact", "wrong"):
        for said in getattr(one, what):
            counts[said.split()[0]][what] += 1
            counts[said.split()[0]]["of_clean"] += not required
    if one.case.recording is not None and one.error is None:
        for finding in examine(load_evidence(one.case.recording)):
            for each in (finding, *finding.also):
                counts[each.name]["said"] += 1
    if one.case.script.stem == "clean":
        counts[score.kebab(one.case.rule)]["clean"] += 1
        counts[score.kebab(one.case.rule)]["silent"] += not one.faults


def scoreboard(cases: Sequence[Case], state: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The result, and the table of ceilings of each device."""
    errors = _load(state / "errors.json")
    judged, not_run, hardware = [], [], "unknown"
    for case in cases:
        found = case if case.recording is not None else recorded(case, state)
        if found.recording is not None:
            judged.append(score.run(found))
            if case.recording is None and hardware == "unknown":
                evidence = load_evidence(found.recording)
                hardware = evidence.job.device_name or evidence.host.cpu_model or hardware
        elif _key(case) in errors:
            judged.append(
                replace(score.judge(case, [], device="unknown"), device=None, error=errors[_key(case)])
            )
        else:
            not_run.append(_key(case))
    ceilings = [
        read(folder, gains)
        for folder, gains in ((state, state), (PLANTED, RESULTS))
        if any(gains.glob("gains_*.json"))
    ]
    answers = [*sorted(state.glob("peers_*.json")), *sorted(RESULTS.glob("peers_*.json"))]
    result = {
        "benchmark": "scoreboard",
        "hardware": hardware,
        "torch": torch.__version__,
        "scripts": len({_key(one.case) for one in judged}),
        "cases": len(judged),
        "total": score.sums(judged),
        "rules": by_rule(judged, ceilings),
        "goals": {found["device"]: found["goals"] for found in ceilings},
        "peers": [peers_on(path, judged) for path in answers],
        "faults": {one.case.name: [*one.faults] for one in judged if one.faults},
        "not_first": {one.case.name: one.first for one in judged if one.first},
        "not_run": not_run,
    }
    return result, ceilings


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="RULE,RULE", default="", help="some folders of tests/planted")
    parser.add_argument(
        "--state", metavar="DIR", type=Path, default=STATE, help="where measurements are kept"
    )
    parser.add_argument("--peers", action="store_true", help="run other tools on the same scripts")
    parser.add_argument("--peers-alone", action="store_true", help="run other tools and nothing else")
    parser.add_argument(
        "--together", type=int, default=2, help="scripts without a gain that run at once (default: 2)"
    )
    parser.add_argument("--no-gains", action="store_true", help="measure no real gains")
    parser.add_argument("--replay", action="store_true", help="measure nothing, judge what is there")
    parser.add_argument("--save", action="store_true", help="write results/scoreboard-HARDWARE_DATE.json")
    options = parser.parse_args()
    if options.only and options.save:
        parser.error("a part of the scripts is not the scoreboard: omit --only or --save")
    only = options.only.replace("-", "_").split(",") if options.only else []
    cases = [case for case in score.cases() if not only or case.rule in only]
    live = [case for case in cases if case.recording is None]
    try:
        if not options.replay and not options.peers_alone:
            diagnose(live, options.state, together=options.together)
            if not options.no_gains:
                measure_gains(live, options.state)
        if not options.replay and (options.peers or options.peers_alone):
            ask_peers(live, options.state)
    except KeyboardInterrupt:
        _say("interrupted: the same command goes on from here")
    if options.peers_alone:
        if options.save:
            add_peers(max(RESULTS.glob("scoreboard-*.json")), options.state, live)
        return
    result, ceilings = scoreboard(cases, options.state)
    print_board(result)
    print(json.dumps(result))
    if options.save:
        for each in (result, *ceilings):
            save(each)


if __name__ == "__main__":
    main()
