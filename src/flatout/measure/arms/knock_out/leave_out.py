"""Steps without one statement of the training loop: what they take is what the statement costs.

A share of the time says where the training thread was found, not what the step would gain.  So the sources
of the job are compiled with a switch around each statement of its training loop that neither trains nor
leaves the loop; the line numbers stay.  With the switch on, the statement is passed over and its variables
keep the values of the step before.  A switch that is off costs a comparison of two numbers.

The training loop is known by its words: statements beside a call of `.backward()` or `.step()`.  Left alone
are statements that train themselves, that leave the loop (`break`, `return`, `yield`), that define or import,
and in a function that is called anew for each step those whose variables are read later.

The code is compiled for this process alone: no cached bytecode is read or written, and the switch is a global
of the user's module, so that a function which is sent to another process takes it along, off.
"""

from __future__ import annotations

import ast
import importlib.machinery
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType, ModuleType
from typing import Any

from flatout.ground.script import main as main_script
from flatout.measure.arms.arm import Arm, ArmContext
from flatout.measure.evidence import Place, Stacks
from flatout.measure.patches import Patches
from flatout.measure.user_code import UserCode

SWITCH = "_flatout_left_out"
NOTHING = -1
LEAST_SHARE = 0.1  # of the step: less cannot be told from noise in a few rounds
MOST_TORN = 0.05  # of the looks: the thread moves on between the look at its phase and the one at its lines
TRAINS = frozenset(("backward", "step"))
WORDS = tuple(f".{word}".encode() for word in TRAINS)  # a file without them has no training loop
ELIGIBLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.For, ast.While, ast.With, ast.If, ast.Try)
LEAVES = (
    *(ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal, ast.Delete),
    *(ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef),
)
LOOPS = (ast.For, ast.AsyncFor, ast.While)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


Rewrite = Callable[[ast.Module, str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    """A statement that can be left out."""

    number: int
    path: str
    first_line: int
    last_line: int


class LeaveOut:
    """The statements of a job that can be left out."""

    def __init__(self, user_code: UserCode) -> None:
        self._user_code = user_code
        self.statements: list[Statement] = []
        self._switched: list[dict[str, Any]] = []  # the names of modules, some of which nobody else can find
        self.rewrites: list[Rewrite] = []  # what else is changed in the sources of a training loop

    def install(self, patches: Patches) -> None:
        """Compile the user's sources with switches from here on."""
        loader = importlib.machinery.SourceFileLoader
        get_code = loader.get_code

        def get_switched(self_: Any, fullname: str) -> CodeType | None:
            code = self._compile(self_.get_filename(fullname))
            return get_code(self_, fullname) if code is None else code

        patches.replace(loader, "get_code", get_switched)
        read_code = main_script.read_code

        def read_switched(path: str) -> CodeType:
            return self._compile(path) or read_code(path)

        patches.replace(main_script, "read_code", read_switched)

    def heavy(self, stacks: Stacks, *, rest_share: float) -> Iterator[tuple[Statement, float]]:
        """Statements that hold much of the time between the phases, with the share of the step they hold."""
        samples = stacks.samples_by_phase.get("rest", 0)
        for statement in self.statements:
            share = self._samples(statement, stacks) / max(1, samples) * rest_share
            if share >= LEAST_SHARE:
                yield statement, share

    def place(self, statement: Statement) -> Place:
        """The first line of a statement."""
        return self._user_code.place_at(statement.path, line=statement.first_line)

    def switch(self, statement: Statement | None) -> None:
        """Pass over a statement, or run all of them."""
        number = NOTHING if statement is None else statement.number
        modules = [each for each in list(sys.modules.values()) if issubclass(type(each), ModuleType)]
        names = [vars(module) for module in modules]
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:  # the training loop is running, wherever it was loaded from
            names.append(frame.f_globals)
            frame = frame.f_back
        for each in (*names, *self._switched):
            if SWITCH in each:
                each[SWITCH] = number
                if statement is not None and all(each is not known for known in self._switched):
                    self._switched.append(each)

    def _samples(self, statement: Statement, stacks: Stacks) -> int:
        """How often the training thread was found in a statement, between the phases and nowhere else."""
        num = num_elsewhere = 0
        for path in stacks.paths:
            if any(self._holds(statement, place) for place in path.places):
                if path.phase != "rest" or path.places[-1] in stacks.differentiable:
                    num_elsewhere += path.samples
                else:
                    num += path.samples
        return num if num_elsewhere <= MOST_TORN * num else 0

    def _holds(self, statement: Statement, place: Place) -> bool:
        inside = statement.first_line <= place.line <= statement.last_line
        return inside and self._user_code.path(place.file) == statement.path

    def _compile(self, file: str) -> CodeType | None:
        """The code of a file with switches; None where it is not the user's, or has no training loop."""
        if not file.endswith(".py") or not self._user_code.is_user_file(file):
            return None
        try:
            with open(file, "rb") as opened:
                source = opened.read()
            if not any(word in source for word in WORDS):
                return None
            path = self._user_code.absolute(file)
            with warnings.catch_warnings(action="ignore"):
                tree = ast.parse(source, file)
                for rewrite in self.rewrites:
                    rewrite(tree, path)
                found = list(_add_switches(tree, path=path, first_number=len(self.statements)))
                if not found:
                    return None
                _define_switch(tree)
                code: CodeType = compile(ast.fix_missing_locations(tree), file, "exec", dont_inherit=True)
            compile(source, file, "exec", dont_inherit=True)  # warns as Python would, and once
        except (OSError, SyntaxError, ValueError, RecursionError):
            return None  # Python's own way to say it is the one the user knows
        self.statements += found
        return code


class WithoutStatement(Arm):
    """Steps without one statement of the training loop."""

    kind = "knock-out"

    def __init__(self, left_out: LeaveOut, statement: Statement, *, suspicion: float) -> None:
        self._left_out, self._statement = left_out, statement
        self.place, self.last_line = left_out.place(statement), statement.last_line
        self.label = f"knock-out {self.place}"
        self.suspicion = suspicion

    def begin(self) -> None:
        self._left_out.switch(self._statement)

    def end(self) -> None:
        self._left_out.switch(None)

    release = end


def propose(context: ArmContext) -> Iterable[Arm]:
    if context.stacks is None:
        return
    rest_share = context.phases_s["rest"] / context.step_s
    for statement, share in context.left_out.heavy(context.stacks, rest_share=rest_share):
        yield WithoutStatement(context.left_out, statement, suspicion=share)


def _add_switches(tree: ast.Module, *, path: str, first_number: int) -> Iterator[Statement]:
    """Put a switch around every statement of `tree` that can be left out, and yield these."""
    number = first_number
    for suite, function, loops in training_suites(tree):
        for position, statement in enumerate(suite):
            if not _can_be_left_out(statement, function=function, in_loop=loops):
                continue
            last_line = statement.end_lineno or statement.lineno
            yield Statement(number=number, path=path, first_line=statement.lineno, last_line=last_line)
            switch = ast.Name(id=SWITCH, ctx=ast.Load())
            test = ast.Compare(left=switch, ops=[ast.NotEq()], comparators=[ast.Constant(number)])
            suite[position] = _located(ast.If(test=test, body=[statement], orelse=[]), statement)
            number += 1


def _located(made: ast.If, original: ast.stmt) -> ast.If:
    for node in (made, *ast.walk(made.test)):
        ast.copy_location(node, original)
    return made


def _define_switch(tree: ast.Module) -> None:
    """Begin the module with `SWITCH = NOTHING`."""
    position = first_statement(tree)
    made = ast.Assign(targets=[ast.Name(id=SWITCH, ctx=ast.Store())], value=ast.Constant(NOTHING))
    tree.body.insert(position, ast.copy_location(made, tree.body[position]))


def first_statement(tree: ast.Module) -> int:
    """Where a module begins, behind its docstring and what must come first."""
    position = 0
    for position, statement in enumerate(tree.body):
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        is_future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        if not (is_future or (position == 0 and is_text)):
            break
    return position


Suite = tuple[list[ast.stmt], ast.AST, bool]


def training_suites(node: ast.AST, *, function: ast.AST | None = None, in_loop: bool = False) -> list[Suite]:
    """(statements, the function around them, whether a loop of it is around them) beside a training call."""
    function = function or node
    found: list[Suite] = []
    for name in ("body", "orelse", "finalbody"):
        suite = getattr(node, name, None)
        if isinstance(suite, list) and any(map(trains, suite)) and not isinstance(node, ast.ClassDef):
            found.append((suite, function, in_loop or isinstance(node, LOOPS)))
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FUNCTIONS):
            if not child.decorator_list:  # what decorates it may compile, record or ship its code
                found += training_suites(child, function=child)
        elif isinstance(child, (ast.stmt, ast.excepthandler)):
            found += training_suites(child, function=function, in_loop=in_loop or isinstance(node, LOOPS))
    return found


def trains(statement: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TRAINS
        for node in within(statement)
    )


def within(node: ast.AST) -> Iterator[ast.AST]:
    """A node and what it holds, functions and classes defined in it left out."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
            yield from within(child)


def _can_be_left_out(statement: ast.stmt, *, function: ast.AST, in_loop: bool) -> bool:
    nodes = list(ast.walk(statement))
    if not isinstance(statement, ELIGIBLE) or not any(isinstance(node, ast.Call) for node in nodes):
        return False
    if trains(statement) or any(isinstance(node, LEAVES) for node in nodes) or _breaks_out(statement):
        return False
    if in_loop:
        return True
    own = set(map(id, nodes))
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return not any(
        isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in stored
        for node in ast.walk(function)
        if id(node) not in own
    )


def _breaks_out(node: ast.AST, *, in_loop: bool = False) -> bool:
    """Whether a `break` or `continue` belongs to a loop around the statement."""
    in_loop = in_loop or isinstance(node, LOOPS)
    return any(
        (isinstance(child, (ast.Break, ast.Continue)) and not in_loop) or _breaks_out(child, in_loop=in_loop)
        for child in ast.iter_child_nodes(node)
    )
