"""The house itself: floors, mirrors, weight of an import, and what the files may say.

A rule of the house that no test holds is a wish.  Each test here globs what it speaks about and asserts
that it found something, so that a moved folder cannot make it pass by looking at nothing.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import flatout

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "flatout"
UNIT = ROOT / "tests" / "unit"
RULES = SOURCE / "doctor" / "rules"
HELP_CPU_S = 0.5

# Rooms of the design that later work builds; a dependency may name one before its first file exists.
DESIGNED_ROOMS = {
    "tuner",
    "planner",
    "monitor",
    "engines/steering",
    "engines/evolution",
    "engines/adapters",
    "memory",
    "multiplex",
    "data",
}


def source_files() -> list[Path]:
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 10
    return files


def has_code(path: Path) -> bool:
    """Whether a module holds more than a docstring."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return any(not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in body)


def mirror_of(path: Path) -> Path:
    """src/flatout/hardware/nvml.py -> tests/unit/hardware/test_nvml.py"""
    inside = path.relative_to(SOURCE)
    return UNIT / inside.parent / f"test_{inside.stem.strip('_')}.py"


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Floors


def test_rooms_import_only_from_floors_beneath_them() -> None:
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command as c; c()",
        "--no-cache",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    contracts = project()["tool"]["importlinter"]["contracts"]
    assert f"Contracts: {len(contracts)} kept, 0 broken." in done.stdout
    assert len(contracts) >= 3


# Mirrors


def test_every_module_has_its_unit_test() -> None:
    """Rules are tested by planted scripts, treatments and patches together: adding one is adding a file."""
    apart = (RULES, SOURCE / "tuner" / "treatments", SOURCE / "tuner" / "patches" / "transforms")
    mirrored = [
        path for path in source_files() if has_code(path) and not any(each in path.parents for each in apart)
    ]
    assert mirrored
    missing = [str(mirror_of(path).relative_to(ROOT)) for path in mirrored if not mirror_of(path).exists()]
    assert not missing


def test_every_unit_test_has_its_module() -> None:
    tests = sorted(set(UNIT.rglob("test_*.py")) - {Path(__file__).resolve()})
    assert tests
    mirrors = {mirror_of(path) for path in source_files()}
    strays = [str(path.relative_to(ROOT)) for path in tests if path not in mirrors]
    assert not strays


def test_every_rule_has_a_planted_script_and_a_clean_twin() -> None:
    files = [
        path for path in RULES.rglob("*.py") if path.parent.name != "ranks"
    ]  # those need several processes
    rules = sorted(path.stem for path in files if not path.stem.startswith("_"))
    assert len(rules) >= 12
    folder = ROOT / "tests" / "planted"
    planted = [str(path.relative_to(folder)) for path in folder.rglob("*.py")]
    lonely = [rule for rule in rules if sum(rule in path for path in planted) < 2]
    assert not lonely


# Maps

LONGEST_LEVEL = 14


def levels() -> Iterator[tuple[Path, list[Path]]]:
    """Every package below the root, and what it lists."""
    for package in sorted(path.parent for path in SOURCE.rglob("__init__.py")):
        if package != SOURCE:
            shown = [path for path in package.iterdir() if path.name not in ("__init__.py", "__pycache__")]
            yield package, shown


def test_no_level_of_the_tree_lists_more_than_a_newcomer_can_take_in() -> None:
    counts = {str(package.relative_to(ROOT)): len(shown) for package, shown in levels()}
    assert len(counts) > 20
    assert {name: count for name, count in counts.items() if count > LONGEST_LEVEL} == {}


# Rooms whose files are all of one kind, each found by being there.
COLLECTIONS = ("doctor/rules/", "tuner/treatments/", "tuner/patches/transforms")


def test_every_room_opens_with_a_map_that_names_all_that_is_in_it() -> None:
    blind, stale, as_files = {}, {}, []
    for package in sorted(path.parent for path in SOURCE.rglob("__init__.py")):
        name = package.relative_to(SOURCE).as_posix()
        said = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))) or ""
        entries = {path.stem for path in package.glob("[!_]*.py")}
        entries |= {path.name for path in package.iterdir() if path.is_dir() and path.name != "__pycache__"}
        if name.startswith(COLLECTIONS):
            assert said, name
            continue
        if unnamed := [entry for entry in sorted(entries) if not re.search(rf"\b{entry}\b", said)]:
            blind[name] = unnamed
        firsts = re.findall(r"^((?:[a-z_]+/?, )*[a-z_]+/?)  +\S", said, flags=re.MULTILINE)
        named = {each.removesuffix("/") for first in firsts for each in first.split(", ")}
        if gone := sorted(named - entries - offered(package)):
            stale[name] = gone
        as_files += [name] * bool(re.search(r"(?:^|;  )[a-z_]+\.py +\S", said, flags=re.MULTILINE))
    assert (blind, stale, as_files) == ({}, {}, [])


def offered(package: Path) -> set[str]:
    """What a package offers by name beside its modules."""
    module = importlib.import_module(".".join(("flatout", *package.relative_to(SOURCE).parts)))
    return set(getattr(module, "__all__", ()))


# Weight


def test_importing_flatout_imports_no_torch() -> None:
    heavy = run_python(
        "import sys, json, flatout;"
        "print(json.dumps(sorted({'torch', 'numpy', 'rich', 'typer'} & sys.modules.keys())))"
    )
    assert json.loads(heavy) == []


def test_every_command_line_module_imports_no_torch() -> None:
    report = run_python(
        "import sys, json, pkgutil, importlib, flatout.cli as room\n"
        "names = [m.name for m in pkgutil.walk_packages(room.__path__, 'flatout.cli.')]\n"
        "for name in names: importlib.import_module(name)\n"
        "print(json.dumps([len(names), sorted({'torch', 'numpy'} & sys.modules.keys())]))"
    )
    num_modules, heavy = json.loads(report)
    assert num_modules > 0
    assert heavy == []


def test_help_answers_without_torch_and_in_half_a_second_of_cpu_time() -> None:
    code = (
        "import sys, runpy\n"
        "sys.argv = ['flatout', '--help']\n"
        "try: runpy.run_module('flatout', run_name='__main__', alter_sys=True)\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules"
    )
    assert "diagnose" in run_python(code)
    assert min(cpu_seconds("-m", "flatout", "--help") for _ in range(3)) < HELP_CPU_S


def cpu_seconds(*arguments: str) -> float:
    """User and system time of one run of this Python, whatever else the machine does."""
    with open(os.devnull, "wb") as nowhere:
        child = subprocess.Popen([sys.executable, *arguments], stdout=nowhere)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    return usage.ru_utime + usage.ru_stime


# Names


def packages() -> Iterator[ModuleType]:
    yield flatout
    for found in pkgutil.walk_packages(flatout.__path__, "flatout."):
        if found.ispkg:
            yield importlib.import_module(found.name)


def public_names(package: ModuleType) -> set[str]:
    """What a package offers: its own values and those of other flatout modules, not its tools."""
    tools = {"TYPE_CHECKING", "annotations"}
    return {
        name
        for name, value in vars(package).items()
        if not name.startswith("_")
        and name not in tools
        and not isinstance(value, ModuleType)
        and getattr(value, "__module__", "flatout").startswith("flatout")
    }


def test_all_equals_the_namespace() -> None:
    declared = [package for package in packages() if hasattr(package, "__all__")]
    assert flatout in declared
    for package in declared:
        assert len(set(package.__all__)) == len(package.__all__), package.__name__
        for name in package.__all__:
            getattr(package, name)
        assert public_names(package) <= set(package.__all__), package.__name__
        assert set(package.__all__) <= set(dir(package)), package.__name__


def test_a_class_name_means_one_class() -> None:
    homes: dict[str, list[str]] = {}
    for path in source_files():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    assert len(homes) > 100
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


ALSO_A_CLASS = {"Answer", "Key", "Suite"}  # aliases that still share the name of a class elsewhere


def test_an_alias_of_a_type_has_not_the_name_of_a_class() -> None:
    """Flags aside, which are written `flags.Device`."""
    classes, aliases = set(), set()
    for path in source_files():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                classes.add(node.name)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                is_other = ast.unparse(node.value).startswith(("TypeVar(", "Annotated["))
                aliases |= set() if is_other else {node.targets[0].id}
    assert len(aliases) > 100
    assert {name for name in aliases & classes if name != name.upper()} == ALSO_A_CLASS


NOT_A_VERB = re.compile(
    r"(?:Whether|The|An?|Every|Each|All|Both|Any|No|Nothing|This|It|If|In|Inside|Where|How)\b|[^A-Z]"
)


def test_the_docstring_of_a_function_begins_with_a_verb() -> None:
    said, others = 0, []
    for path in source_files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            is_value = any("property" in ast.unparse(each) for each in node.decorator_list)
            words = ast.get_docstring(node)
            if words and not is_value:
                said += 1
                if NOT_A_VERB.match(words):
                    others.append(f"{path.relative_to(SOURCE)}:{node.lineno} {node.name}: {words[:40]}")
    assert said > 1000
    assert not others


def test_types_are_shipped() -> None:
    assert (SOURCE / "py.typed").is_file()
    wheel = project()["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": ["src/flatout"]}


# Dependencies


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def dependency_lines() -> dict[str, list[str]]:
    """Requirement -> the comments beside it; lines of the project's lists, as written."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lists = text.partition("\ndependencies = [")[2].partition("\n[project.scripts]")[0]
    lines: dict[str, list[str]] = {}
    for requirement, comment in re.findall(r'^  "([^"]+)",(?: *# *(.*))?$', lists, flags=re.MULTILINE):
        lines.setdefault(requirement, []).append(comment)
    return lines


def named_by(comment: str) -> list[tuple[str, bool]]:
    """Each thing a comment names, and whether it exists."""
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = []
    for name in (part.strip() for part in comment.split(",")):
        is_file = bool(name) and ((SOURCE / name).exists() or (ROOT / name).is_file())
        is_target = name.startswith("make ") and name.removeprefix("make ") in targets
        named.append((name, is_file or is_target or name in DESIGNED_ROOMS))
    return named


def test_every_dependency_names_what_needs_it() -> None:
    lines = dependency_lines()
    declared = project()["project"]
    groups = [declared["dependencies"], *declared["optional-dependencies"].values()]
    assert sorted(line for group in groups for line in group) == sorted(
        requirement for requirement, comments in lines.items() for _ in comments
    )
    unnamed = [
        f"{requirement}: {name!r}"
        for requirement, comments in lines.items()
        for comment in comments
        for name, exists in named_by(comment)
        if not exists
    ]
    assert not unnamed


def test_dev_pins_the_torch_that_the_checks_run_with() -> None:
    assert [line for line in dependency_lines() if line.startswith("torch==")] == ["torch==2.13.0"]


# Words

# Assembled from pieces, so that this file does not hold what it forbids.
FORBIDDEN = (
    r"(?<![\w.~])/(?:wo" + r"rk|fa" + r"rm|ro" + r"ot)/",
    r"\bAI " + r"assistant\b",
    r"language model " + r"wrote",
    r"\b(?:this|developer) ses" + r"sion\b",
    r"\bTO" + r"DO\b|\bFIX" + r"ME\b",
    "[\U0001f300-\U0001faff\u2705\u274c\u2728]",
)


def kept_files() -> list[Path]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("git is not installed: the list of kept files is git's")
    if done.returncode != 0:
        pytest.skip("not a git checkout: the list of kept files is git's")
    names = [name for name in done.stdout.decode().split("\0") if name]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def test_no_file_says_where_or_how_it_was_made() -> None:
    files = kept_files()
    assert len(files) > 30
    here = [re.escape(str(ROOT))] if len(ROOT.parts) > 2 else []
    pattern = re.compile("|".join([*FORBIDDEN, *here]), flags=re.IGNORECASE)
    found = []
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [f"{path.relative_to(ROOT)}: {match.group()!r}" for match in pattern.finditer(text)]
    assert not found


# Docs


def test_docs_build_without_a_warning_and_need_no_network(tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 8
    loads = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=[\"']?(?:https?:)?//[^\s\"'>]+")
    fetched = {match for page in pages for match in loads.findall(page.read_text(encoding="utf-8"))}
    assert not fetched
