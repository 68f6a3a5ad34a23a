"""Blocks of the training loop itself.  The loop runs all the time, so its code cannot be replaced: it is
compiled with switches from the start.

The job's sources are compiled with a switch around each block of the training loop that neither trains nor
leaves the loop; line numbers stay the same.  A switch that is off costs two integer comparisons.

The source identifies the training loop: statements in a loop, beside a call of `.backward()` or `.step()`.
`function_blocks` handles code that each step calls anew.

The compiled code lives in this process only: no cached bytecode is read or written.  The switch is a global
of the user's module, so a function that is sent to another process carries it along, switched off.
"""

from __future__ import annotations

import ast
import importlib.machinery
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from flatout.ground.script import main as main_script
from flatout.measure.arms.arm import Arm, ArmContext
from flatout.measure.arms.knock_out.blocks import Block, loop_blocks
from flatout.measure.arms.knock_out.knock_out import ALWAYS, LEAST_SHARE, KnockOut, Shares
from flatout.measure.arms.knock_out.rewrite import bind, call, locate
from flatout.measure.evidence import Place
from flatout.measure.patches import Patches
from flatout.measure.user_code import UserCode

if TYPE_CHECKING:
    from flatout.measure.arms.knock_out.kept_results import KeptResults

SWITCH = "_flatout_left_out"
NOTHING = -1
TRAINS = frozenset(("backward", "step"))
WORDS = tuple(f".{word}".encode() for word in TRAINS)  # a file without them has no training loop
LEAVES = (
    *(ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal, ast.Delete),
    *(ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef),
)
DEFINES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Global, ast.Nonlocal)
# Decorators that only call the function: hydra.main, torch.distributed's record, click's and typer's command.
ENTRY_POINTS = (
    "main",
    "record",
    "command",
    "option",
    "argument",
    "enable_grad",
    "staticmethod",
    "classmethod",
)
LOOPS = (ast.For, ast.AsyncFor, ast.While)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


Rewrite = Callable[[ast.Module, str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    """A block of a training loop, with a switch if it can be removed."""

    number: int
    path: str
    function: str | None
    block: Block


class LeaveOut:
    """The statements of a job that can be removed."""

    def __init__(self, user_code: UserCode) -> None:
        self._user_code = user_code
        self.statements: list[Statement] = []
        self._switched: list[dict[str, Any]] = []  # namespaces of modules; nothing else refers to some
        self.rewrites: list[Rewrite] = []  # other changes to the sources of a training loop

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

    def place(self, statement: Statement) -> Place:
        """Return the first line of a block."""
        line = statement.block.first_line
        return self._user_code.place_at(statement.path, line=line, function=statement.function)

    def switch(self, switch: Any = NOTHING) -> None:
        """Let `switch` decide about the block with its number; with no switch, every block runs."""
        modules = [each for each in list(sys.modules.values()) if issubclass(type(each), ModuleType)]
        names = [vars(module) for module in modules]
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:  # the running training loop, wherever it was loaded from
            names.append(frame.f_globals)
            frame = frame.f_back
        for each in (*names, *self._switched):
            if SWITCH in each:
                each[SWITCH] = switch
                if switch is not NOTHING and all(each is not known for known in self._switched):
                    self._switched.append(each)

    def _compile(self, file: str) -> CodeType | None:
        """Compile a file with switches; None if it is not the user's or has no training loop."""
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
                if not any(statement.block.refusal is None for statement in found):
                    return None
                _define_switch(tree)
                code: CodeType = compile(ast.fix_missing_locations(tree), file, "exec", dont_inherit=True)
            compile(source, file, "exec", dont_inherit=True)  # warns as Python would, and once
        except (OSError, SyntaxError, ValueError, RecursionError):
            return None  # Python reports it in the way the user knows
        self.statements += found
        return code


class LoopBlock(KnockOut):
    """Steps without one block of the training loop."""

    def __init__(
        self, context: ArmContext, shares: Shares, statement: Statement, *, suspicion: float
    ) -> None:
        place = context.left_out.place(statement)
        super().__init__(context, shares, place, statement.block, suspicion=suspicion)
        self._number = statement.number

    def put_in(self, results: KeptResults) -> None:
        results.number = self._number
        self._context.left_out.switch(results)

    def take_out(self) -> None:
        self._context.left_out.switch()


def propose(context: ArmContext) -> Iterable[Arm]:
    """Propose heavy blocks of the loop; on a GPU, where the host's samples miss the time, all of them."""
    shares = Shares(context)
    for statement in context.left_out.statements:
        place = context.left_out.place(statement)
        share = shares.of(place.file, place.line, statement.block.last_line)
        if share >= LEAST_SHARE or (context.device == "cuda" and statement.block.refusal is None):
            yield LoopBlock(context, shares, statement, suspicion=max(share, ALWAYS))


def _add_switches(tree: ast.Module, *, path: str, first_number: int) -> Iterator[Statement]:
    """Put a switch around every block of `tree` that can be removed, and yield all blocks."""
    number = first_number
    for suite, scope, in_loop in training_suites(tree):
        if not in_loop or not isinstance(scope, (ast.FunctionDef, ast.Module)):
            continue
        for block in list(loop_blocks(scope, suite, tree)):
            if any(isinstance(node, DEFINES) for node in _statements(suite, block)):
                continue
            name = scope.name if isinstance(scope, ast.FunctionDef) else None
            yield Statement(number=number, path=path, function=name, block=block)
            if block.refusal is None:
                _put_switch(suite, block, number)
            number += 1


def _statements(suite: list[ast.stmt], block: Block) -> list[ast.stmt]:
    starts = [(statement.lineno, statement.col_offset) for statement in suite]
    first = starts.index(block.start)
    return suite[first : first + block.num_statements]


def _put_switch(suite: list[ast.stmt], block: Block, number: int) -> None:
    run = _statements(suite, block)
    switch, own = ast.Name(SWITCH, ast.Load()), ast.Constant(number)
    is_other = ast.Compare(switch, [ast.NotEq()], [own])
    runs = ast.BoolOp(ast.Or(), [is_other, ast.UnaryOp(ast.Not(), call(SWITCH, "is_free"))])
    note = ast.If(ast.Compare(switch, [ast.Eq()], [own]), [ast.Expr(call(SWITCH, "note"))], [])
    made = ast.If(runs, [*run, note], [bind(block.results, SWITCH)])
    locate(made, run[0])
    first = suite.index(run[0])
    suite[first : first + len(run)] = [made]


def _define_switch(tree: ast.Module) -> None:
    """Begin the module with `SWITCH = NOTHING`."""
    position = first_statement(tree)
    made = ast.Assign(targets=[ast.Name(id=SWITCH, ctx=ast.Store())], value=ast.Constant(NOTHING))
    tree.body.insert(position, ast.copy_location(made, tree.body[position]))


def first_statement(tree: ast.Module) -> int:
    """Return the index of a module's first statement after its docstring and __future__ imports."""
    position = 0
    for position, statement in enumerate(tree.body):
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        is_future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        if not (is_future or (position == 0 and is_text)):
            break
    return position


Suite = tuple[list[ast.stmt], ast.AST, bool]


def training_suites(node: ast.AST, *, function: ast.AST | None = None, in_loop: bool = False) -> list[Suite]:
    """Return (statements, enclosing function, whether inside a loop) for each suite with a training call."""
    function = function or node
    found: list[Suite] = []
    for name in ("body", "orelse", "finalbody"):
        suite = getattr(node, name, None)
        if isinstance(suite, list) and any(map(trains, suite)) and not isinstance(node, ast.ClassDef):
            found.append((suite, function, in_loop or isinstance(node, LOOPS)))
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FUNCTIONS):
            if runs_as_written(child):
                found += training_suites(child, function=child)
        elif isinstance(child, (ast.stmt, ast.excepthandler)):
            found += training_suites(child, function=function, in_loop=in_loop or isinstance(node, LOOPS))
    return found


def runs_as_written(function: ast.AST) -> bool:
    """Return whether no decorator may compile, record or ship the function's code."""
    decorators: list[ast.expr] = getattr(function, "decorator_list", [])
    return all(_name_of(decorator) in ENTRY_POINTS for decorator in decorators)


def _name_of(decorator: ast.expr) -> str | None:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", None)


def trains(statement: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TRAINS
        for node in within(statement)
    )


def within(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and everything in it except nested functions and classes."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
            yield from within(child)
