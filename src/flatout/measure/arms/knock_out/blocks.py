"""Find blocks of the user's code that can be removed, judged by their source.

A block is a whole function, or consecutive statements of one.  Its results are the names that it binds and
other code reads.  A list that a loop fills is not a result: the statement that consumes it
(`torch.stack(rows)`) belongs to the block, because its cost disappears with the loop.  So a run of statements
begins at one statement and extends until it has consumed what it filled.

Blocks that train, step an environment, write files, bind global names, yield, or leave an enclosing loop are
refused, each with a reason.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LOOPS = (ast.For, ast.AsyncFor, ast.While)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
SUITES = ("body", "orelse", "finalbody")
FILLS = frozenset(("append", "extend", "insert", "add", "update", "setdefault", "appendleft"))
TRAINS = frozenset(("backward", "step"))
WRITES = frozenset(
    ("save", "savez", "dump", "write", "writelines", "write_text", "write_bytes", "to_csv", "mkdir")
)
DEEPEST_CALLS = 3  # levels of calls within the same file that are inspected
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Scope = FunctionNode | ast.Module


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Consecutive statements of one function."""

    first_line: int
    last_line: int
    start: tuple[int, int]  # line and column of the first statement, to find it in another tree
    num_statements: int
    results: tuple[str, ...]  # names and attributes (`self.hidden`) that it binds and other code reads
    inputs: tuple[str, ...]  # names that it reads
    is_tail: bool  # it ends the function, so its result is what the function returns
    refusal: str | None = None


def find_function(tree: ast.AST, name: str, first_line: int) -> FunctionNode | None:
    """Find the function whose code object has this name and first line."""
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS) and node.name == name:
            lines = [node.lineno, *(decorator.lineno for decorator in node.decorator_list)]
            if min(lines) == first_line:
                return node
    return None


def whole_block(function: FunctionNode, tree: ast.AST) -> Block:
    """Make one block of all statements of a function."""
    first = 1 if ast.get_docstring(function) is not None and len(function.body) > 1 else 0
    made = _block(function, function.body, first, len(function.body) - 1, tree)
    return replace(made, first_line=function.lineno)


def inner_blocks(function: FunctionNode, block: Block, tree: ast.AST) -> list[Block]:
    """List the blocks directly inside a block, in order; open compound statements that cannot stand alone."""
    suite, first = find_statements(function, block)
    return _runs_in(function, suite, range(first, first + block.num_statements), tree, beside=block)


def loop_blocks(scope: Scope, suite: list[ast.stmt], tree: ast.AST) -> Iterator[Block]:
    """Yield the blocks of a training loop's statements, refused ones included.

    Lists that live from step to step (of losses, of times) may stay unchanged for a few steps, so a filled
    list counts only if the same step uses it.
    """
    position = 0
    while position < len(suite):
        made = _run_at(scope, suite, position, tree, in_step=True)
        yield made
        position += made.num_statements if made.refusal is None else 1


def find_statements(function: Scope, block: Block) -> tuple[list[ast.stmt], int]:
    """Return the statement list of `function` that holds a block, and the position of its first statement."""
    for suite in _suites(function):
        for position, statement in enumerate(suite):
            if (statement.lineno, statement.col_offset) == block.start:
                return suite, position
    raise LookupError(f"line {block.start[0]} is not where it was")


def _suites(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield every list of statements below a node, except in functions and classes defined there."""
    for name in SUITES:
        suite = getattr(node, name, None)
        if isinstance(suite, list):
            yield suite
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.excepthandler)) and not isinstance(
            child, (*FUNCTIONS, ast.ClassDef)
        ):
            yield from _suites(child)


def _opened(function: FunctionNode, statement: ast.stmt, tree: ast.AST) -> list[Block]:
    """Return the blocks inside a compound statement."""
    if isinstance(statement, (*FUNCTIONS, ast.ClassDef, ast.Try)):
        return []
    found: list[Block] = []
    for name in SUITES:
        suite = getattr(statement, name, None)
        if isinstance(suite, list):
            found += _runs_in(function, suite, range(len(suite)), tree)
    return found


def _runs_in(
    function: FunctionNode,
    suite: list[ast.stmt],
    positions: range,
    tree: ast.AST,
    *,
    beside: Block | None = None,
) -> list[Block]:
    """Return the blocks of some statements except those in `beside`; open compound statements if needed."""
    found: list[Block] = []
    position = positions.start
    while position < positions.stop:
        made = _run_at(function, suite, position, tree)
        same = beside is not None and (made.num_statements, made.start) == (
            beside.num_statements,
            beside.start,
        )
        if same or made.refusal is not None:
            found += _opened(function, suite[position], tree)
            position += 1
        else:
            found.append(made)
            position += made.num_statements
    return found


def _run_at(
    scope: Scope, suite: list[ast.stmt], position: int, tree: ast.AST, *, in_step: bool = False
) -> Block:
    """Return the shortest run that begins at a statement and consumes what it fills.

    Samples and reports know lines alone, so statements of one line (`a(); b()`) are one block if they can be.
    """
    last = position
    while last + 1 < len(suite):
        filled = _filled(suite[position : last + 1])
        if not filled or not filled & _loaded(suite[last + 1 :]):
            break
        last += 1
    made = _block(scope, suite, position, last, tree, in_step=in_step)
    same_line = last
    while same_line + 1 < len(suite) and suite[same_line + 1].lineno == suite[last].end_lineno:
        same_line += 1
    if same_line == last or made.refusal is not None:
        return made
    longer = _block(scope, suite, position, same_line, tree, in_step=in_step)
    return longer if longer.refusal is None else made


def _block(
    scope: Scope, suite: list[ast.stmt], first: int, last: int, tree: ast.AST, *, in_step: bool = False
) -> Block:
    run = suite[first : last + 1]
    inside, whole = _uses(run), _uses_in(scope)
    is_tail = not in_step and suite is scope.body and last == len(suite) - 1
    # an attribute is state: another function may read it
    results = sorted(name for name in _stored(run) if whole.reads[name] > inside.reads[name] or "." in name)
    return Block(
        first_line=run[0].lineno,
        last_line=run[-1].end_lineno or run[-1].lineno,
        start=(run[0].lineno, run[0].col_offset),
        num_statements=len(run),
        results=tuple(results),
        inputs=tuple(sorted(_live_in(run) & whole.bound)),
        is_tail=is_tail,
        refusal=_refusal(scope, run, is_tail=is_tail, tree=tree)
        or _tie(run, inside, _uses(suite) if in_step else whole),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Uses:
    """Count how often statements read names and attributes, and fill collections.

    The uses outside a run are the uses of the whole scope minus those inside: a scope of a thousand
    statements is walked once, not once per statement.
    """

    reads: Counter[str]
    fills: Counter[str]
    bound: frozenset[str] = frozenset()
    declared: frozenset[str] = frozenset()  # of another scope
    yields: bool = False


def _uses(statements: Iterable[ast.AST]) -> _Uses:
    reads: Counter[str] = Counter()
    fills: Counter[str] = Counter()
    for statement in statements:
        for node in ast.walk(statement):
            reads.update(_names([node], ast.Load) or _attributes([node], ast.Load))
            fills.update(_filled_by([node]))
    return _Uses(reads=reads, fills=fills)


@lru_cache(maxsize=64)
def _uses_in(scope: Scope) -> _Uses:
    arguments = () if isinstance(scope, ast.Module) else ast.walk(scope.args)
    declarations = [node for node in ast.walk(scope) if isinstance(node, (ast.Global, ast.Nonlocal))]
    return replace(
        _uses([scope]),
        bound=frozenset(node.arg for node in arguments if isinstance(node, ast.arg)) | _stored(scope.body),
        declared=frozenset(name for node in declarations for name in node.names),
        yields=any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in _own(scope.body)),
    )


# -- names


def _names(nodes: Iterable[ast.AST], context: type) -> set[str]:
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, context)}


def _attributes(nodes: Iterable[ast.AST], context: type) -> set[str]:
    """Return attributes of `self` (`self.hidden`) that appear in a context."""
    return {
        f"{node.value.id}.{node.attr}"
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and isinstance(node.ctx, context)
    }


def _own(statements: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield the nodes that run with the statements, except those inside nested functions and classes."""
    for node in statements:
        yield node
        if isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
            continue
        yield from _own(ast.iter_child_nodes(node))


def _stored(statements: Iterable[ast.stmt]) -> set[str]:
    """Return the names and attributes that statements bind, without the variables of comprehensions."""
    found: set[str] = set()

    def walk(node: ast.AST) -> None:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            found.add(node.name)
            return
        if isinstance(node, ast.Lambda):
            return
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            found.update(_names([node.value], ast.Load))  # `out[i] = value` changes what the name holds
        found.update(_names([node], ast.Store) | _attributes([node], ast.Store))
        for child in ast.iter_child_nodes(node):
            if not (isinstance(node, ast.comprehension) and child is node.target):
                walk(child)

    for statement in statements:
        walk(statement)
    return found


def _live_in(statements: Iterable[ast.stmt]) -> set[str]:
    """Return the names that statements read before they bind them."""
    found: set[str] = set()
    bound: set[str] = set()

    def walk(node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            parts: list[ast.AST] = [node.value, *node.targets]
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            if isinstance(node, ast.AugAssign):
                found.update(_names(ast.walk(node.target), ast.Store) - bound)
            parts = [part for part in (node.value, node.target) if part is not None]
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            parts = [node.iter, node.target, *node.body, *node.orelse]
        else:
            parts = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                bound.add(node.id)
            elif node.id not in bound:
                found.add(node.id)
        for part in parts:
            walk(part)

    for statement in statements:
        walk(statement)
    return found


def _loaded(statements: Iterable[ast.stmt]) -> set[str]:
    return _names((node for statement in statements for node in ast.walk(statement)), ast.Load)


def _filled(statements: Iterable[ast.AST]) -> set[str]:
    """Return the names of lists and other collections that statements fill."""
    return _filled_by(_own(statements))


def _filled_by(nodes: Iterable[ast.AST]) -> set[str]:
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FILLS:
            if isinstance(node.func.value, ast.Name):
                found.add(node.func.value.id)
        elif isinstance(node, ast.Assign) and isinstance(node.value, COMPREHENSIONS):
            found |= _names(node.targets, ast.Store)
    return found


# -- what cannot be removed


def _refusal(function: Scope, run: list[ast.stmt], *, is_tail: bool, tree: ast.AST) -> str | None:
    """Return the reason why a run of statements cannot be removed."""
    own = list(_own(run))
    if isinstance(function, ast.AsyncFunctionDef) or any(isinstance(node, ast.Await) for node in own):
        return "it is asynchronous"
    if _uses_in(function).yields:
        return "it is a generator"
    if any(isinstance(node, ast.Return) for node in own) and not is_tail:
        return "it may return from the function"
    if any(_leaves_loop(statement) for statement in run):
        return "it leaves or continues a loop around it"
    if any(isinstance(node, (ast.Delete, ast.Import, ast.ImportFrom)) for node in own):
        return "it imports or deletes names"
    if _uses_in(function).declared & _stored(run):
        return "it binds names of another scope"
    if not any(isinstance(node, (ast.Call, ast.BinOp, ast.Subscript)) for node in own):
        return "it computes nothing"
    return _effect(run, tree, depth=DEEPEST_CALLS)


def _tie(run: list[ast.stmt], inside: _Uses, whole: _Uses) -> str | None:
    """Return the reason if a list is filled inside the run and used outside, or the reverse."""
    if any(whole.reads[name] > inside.reads[name] for name in _filled(run)):
        return "what it fills is used outside it"
    outside = any(whole.fills[name] > inside.fills[name] for name in _loaded(run))
    return "what it uses is filled outside it" if outside else None


def _leaves_loop(node: ast.AST, *, in_loop: bool = False) -> bool:
    if isinstance(node, (ast.Break, ast.Continue)):
        return not in_loop
    if isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
        return False
    return any(
        _leaves_loop(child, in_loop=in_loop or isinstance(node, LOOPS))
        for child in ast.iter_child_nodes(node)
    )


def _effect(run: Iterable[ast.AST], tree: ast.AST, *, depth: int) -> str | None:
    """Return the side effect of a run, or of a function in the same file that it calls."""
    effect, called = _done_by(run)
    functions, seen = _functions_of(tree), set(called)
    while effect is None and depth and called:
        below: set[str] = set()
        for name in sorted(called):
            for effect, names in functions.get(name, ()):
                if effect is not None:
                    return effect
                below |= names
        called = frozenset(below - seen)
        seen |= called
        depth -= 1
    return effect


@lru_cache(maxsize=64)
def _functions_of(tree: ast.AST) -> dict[str, list[tuple[str | None, frozenset[str]]]]:
    """Map each function name of a file to its own side effects and the names it calls."""
    found: dict[str, list[tuple[str | None, frozenset[str]]]] = {}
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            found.setdefault(node.name, []).append(_done_by(node.body))
    return found


def _done_by(run: Iterable[ast.AST]) -> tuple[str | None, frozenset[str]]:
    """Return the side effect of the statements themselves, and the names they call."""
    called: set[str] = set()
    for node in _own(run):
        if not isinstance(node, ast.Call):
            continue
        name = str(getattr(node.func, "attr", getattr(node.func, "id", "")))
        if name in TRAINS and isinstance(node.func, ast.Attribute):
            return "it trains, or steps an environment", frozenset()
        if name in WRITES or name == "open":
            return "it writes or opens files", frozenset()
        called.add(name)
    return None, frozenset(called)
