"""Serve batches again that no DataLoader makes: `x, y = get_batch()`, and loops over a generator.

The job's sources are compiled with a switch around each statement of the training loop that assigns to names.
In a block of this arm the statements that make the batch run in the first step, which is never timed; later
steps assign the same values again, whole or halved.  Inputs and targets are halved together, wherever the
loss is computed.  A loop over an iterable that is not a DataLoader is watched like one.

Data flow identifies the statements that make the batch: back from the call of `.backward()`, through the
statement that calls the model, to assignments that need nothing a model computed.  A simulator that is
stepped with the model's actions does not count.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.measure.arms.arm import Arm, ArmContext
from flatout.measure.arms.knock_out.leave_out import (
    FUNCTIONS,
    LEAVES,
    LOOPS,
    LeaveOut,
    first_statement,
    runs_as_written,
    training_suites,
    trains,
)
from flatout.measure.batches import KeptBatch, arrays_of, halve, is_computed, num_rows
from flatout.measure.clock import EXCLUDED
from flatout.measure.loading.loaders import LoaderWatch
from flatout.measure.patches import Patches, compile_sizes_apart
from flatout.measure.user_code import UserCode

SWITCH = "_flatout_batch"
PRELUDE = f"{SWITCH} = getattr(__import__('sys').modules.get({__name__!r}), 'installed', None)"
PLAIN = (range, list, tuple, dict, set, frozenset, str, bytes)  # making their items costs nothing
SUSPICION = 0.1  # for kept batches, which are not a cause by themselves: heavy blocks come first

installed: BatchStatements | None = None  # one per process; the job's modules look it up


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A statement of a training loop, and the names it reads and binds."""

    first_line: int
    last_line: int
    loads: frozenset[str]
    stores: frozenset[str]
    number: int | None  # of its switch, if it can be served
    is_loop: bool
    goes_back: bool  # it calls .backward()
    assigns: frozenset[str] = frozenset()  # what it binds in any case, if its loops run at all
    has_calls: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    """Consecutive statements that include `.backward()`."""

    path: str
    items: tuple[Item, ...]


class NotMade(Exception):
    """Says why no statement can be identified as the one that makes the batch."""


class BatchStatements:
    """The statements of a job that may make its batch, and what they made."""

    def __init__(self, user_code: UserCode, loaders: LoaderWatch) -> None:
        self.user_code, self.loaders = user_code, loaders
        self.suites: list[Suite] = []
        self._num_switches = 0
        self._arm: ServedStatements | None = None

    def __reduce__(self) -> Any:
        return type(None), ()  # a function sent to another process runs there unchanged

    def install(self, left_out: LeaveOut, patches: Patches) -> None:
        """Compile the job's sources with switches from here on."""
        left_out.rewrites.append(self.rewrite)
        patches.replace(sys.modules[__name__], "installed", self)

    def begin(self, arm: ServedStatements | None) -> None:
        self._arm = arm

    # -- what the switches of the job's sources ask for

    def serves(self, number: int) -> bool:
        return self._arm is not None and self._arm.has(number)

    def keep(self, number: int, values: Any) -> None:
        if self._arm is not None:
            self._arm.keep(number, values)

    def give(self, number: int) -> Any:
        assert self._arm is not None  # `serves` said so
        return self._arm.give(number)

    def watched(self, iterable: Any) -> Any:
        """Return what a training loop iterates, watched if it makes batches without a DataLoader."""
        if isinstance(iterable, PLAIN) or not self.loaders.is_training_thread():
            return iterable
        from torch.utils.data import DataLoader

        if isinstance(iterable, DataLoader) or hasattr(iterable, "shape"):
            return iterable
        return self.loaders.watch_if_it_makes_batches(iterable)

    # -- the sources

    def rewrite(self, tree: ast.Module, path: str) -> None:
        """Put switches around the statements of `tree` that may make a batch."""
        loops, num_before = list(_training_loops(tree)), self._num_switches
        for loop in loops:
            loop.iter = _watched(loop.iter)
        for suite, _function, _in_loop in training_suites(tree):
            if not any(map(_goes_back, suite)):
                continue  # an inner loop holds it
            items = []
            for position, statement in enumerate(suite):
                number = None
                if _can_be_served(statement):
                    number = self._num_switches
                    self._num_switches += 1
                    suite[position] = _switched(statement, number)
                items.append(_item(statement, number))
            self.suites.append(Suite(path=path, items=tuple(items)))
        if loops or self._num_switches > num_before:
            position = first_statement(tree)
            tree.body[position:position] = [
                _placed(each, tree.body[position]) for each in ast.parse(PRELUDE).body
            ]

    def find(self, context: ArmContext) -> tuple[Suite, list[Item], str | None]:
        """Find the statements that make the batch, and the reason why half of it cannot be served."""
        lines = _lines_of_models(context)
        if not lines:
            raise NotMade("too few steps were measured to see where the model is called")
        inner: tuple[Suite, list[Item]] | None = None
        for suite in self.suites:
            # of several statements on one line, only those with calls can be meant
            calling = [item for item in suite.items if item.has_calls and self._holds(suite, item, lines)]
            if calling and any(item.goes_back for item in suite.items):
                inner = suite, calling  # outer loops come before the loops inside them
        if inner is None:
            raise NotMade("no statement that calls the model was found beside one that calls .backward()")
        suite, calling = inner
        behind = _behind_gradients(suite)
        made = making(suite, calling)
        carried = _carried(suite, calling) if any(item in behind for item in calling) else frozenset()
        half = f"the model also takes what an earlier step made ({', '.join(sorted(carried))})"
        return suite, made, half if carried else None

    def _holds(self, suite: Suite, item: Item, lines: set[tuple[str, int]]) -> bool:
        return any(
            item.first_line <= line <= item.last_line and self.user_code.path(file) == suite.path
            for file, line in lines
        )


class ServedStatements(Arm):
    """Steps that skip the statements that make the batch."""

    def __init__(self, statements: BatchStatements, items: Sequence[Item], suite: Suite | None) -> None:
        self._statements = statements
        self._numbers = frozenset(item.number for item in items)
        self._kept: dict[int, list[KeptBatch]] = {}
        self._position: dict[int, int] = {}  # a statement may run several times in a step
        self._rows: int | None = None
        if suite is not None and items:
            first = min(items, key=lambda item: item.first_line)
            self.place = statements.user_code.place_at(suite.path, line=first.first_line)
            self.last_line = first.last_line

    def begin(self) -> None:
        self._kept.clear()
        self._rows = None
        self.step_end()
        self._statements.begin(self)

    def step_end(self) -> None:
        self._position = {}

    def end(self) -> None:
        self._statements.begin(None)
        self._kept.clear()

    release = end

    def has(self, number: int) -> bool:
        """Return whether a value is kept for the next run of the statement."""
        if number not in self._numbers or self.refusal is not None:
            return False
        kept, position = self._kept.get(number, []), self._position.get(number, 0)
        return position < len(kept) and not kept[position].changed

    def keep(self, number: int, values: Any) -> None:
        if number not in self._numbers:
            return
        if is_computed(values):
            self.refusal = "the statements make no batch: gradients flow into what they make"
            return
        clock = self._statements.loaders.clock
        clock.enter(EXCLUDED)
        try:
            kept = self._kept.setdefault(number, [])
            position = self._position.get(number, 0)
            self._position[number] = position + 1
            self.fell_back = True
            changed = position < len(kept)  # the script changed it in place, so keep a copy
            kept[position : position + 1] = [KeptBatch(self._changed(values), copies=changed)]
        finally:
            clock.leave()

    def give(self, number: int) -> Any:
        clock = self._statements.loaders.clock
        clock.enter(EXCLUDED)
        try:
            position = self._position.get(number, 0)
            self._position[number] = position + 1
            return self._kept[number][position].serve()
        finally:
            clock.leave()

    def _changed(self, values: Any) -> Any:
        return values


class CachedStatements(ServedStatements):
    """Steps on the batch of the block's first step."""

    kind = label = "cached"
    suspicion = SUSPICION
    fewest_rounds = 3


class HalfStatements(ServedStatements):
    """Steps on the first half of that batch."""

    kind = label = "half"
    baseline = "cached"
    suspicion = SUSPICION
    fewest_rounds = 3

    def begin(self) -> None:
        self._patches = Patches()
        compile_sizes_apart(self._patches)
        super().begin()

    def end(self) -> None:
        super().end()
        self._patches.undo()

    def _changed(self, values: Any) -> Any:
        if not arrays_of(values):
            return values  # an index list or a word: what is made from it is halved
        if self._rows is None:
            self._rows = num_rows(values)
        halved = halve(values, self._rows)
        if halved is None:
            self.refusal = (
                "the batches have no common first dimension"
                if self._rows is None
                else f"batches of {self._rows} are too small for it"
            )
        return values if halved is None else halved


def propose(context: ArmContext) -> Iterable[Arm]:
    """Propose arms for a job that uses no DataLoader."""
    statements = context.batch_statements
    try:
        suite, items, cannot_halve = statements.find(context)
    except NotMade as reason:
        arms = CachedStatements(statements, (), None), HalfStatements(statements, (), None)
        for arm in arms:
            arm.refusal = f"no DataLoader is trained on, and {reason}"
        return arms
    cached, half = CachedStatements(statements, items, suite), HalfStatements(statements, items, suite)
    half.refusal = cannot_halve
    return cached, half


def making(suite: Suite, calling: Sequence[Item]) -> list[Item]:
    """Return the statements of a suite that make the batch."""
    if all(item.is_loop for item in calling):
        raise NotMade("the model is called in a separate loop, on what that loop makes")
    computed = _computed(suite, calling)
    made = [
        item
        for item in _behind_gradients(suite)
        if item.number is not None and item not in calling and not item.loads & computed
    ]
    passed_on = frozenset().union(*(item.stores for item in made)) if made else frozenset()
    if not any(item.loads & passed_on for item in calling if not item.is_loop):
        raise NotMade("no assignment directly in the training loop makes the model's input")
    return sorted(made, key=lambda item: item.first_line)


def _behind_gradients(suite: Suite) -> list[Item]:
    """Return the statements whose results `.backward()` needs."""
    needed: set[str] = set()
    found: list[Item] = []
    waiting = [item for item in suite.items if item.goes_back]
    while waiting:
        item = waiting.pop()
        found.append(item)
        needed |= item.loads
        waiting += [each for each in suite.items if each.stores & needed and each not in (*found, *waiting)]
    return found


def _computed(suite: Suite, calling: Sequence[Item]) -> frozenset[str]:
    """Return the names of what a model computed, in this step or an earlier one."""
    names = frozenset().union(*(item.stores for item in calling))
    while True:
        more = names.union(*(item.stores for item in suite.items if item.loads & names))
        if more == names:
            return names
        names = more


def _carried(suite: Suite, calling: Sequence[Item]) -> frozenset[str]:
    """Return the names that the model takes from an earlier step, or from what one computed."""
    behind = _behind_gradients(suite)
    earlier = set(_computed(suite, calling))  # when a step begins, each has its value from the one before
    found: set[str] = set()
    for item in suite.items:
        taken = item.loads & earlier
        if item in calling and item in behind:
            found |= taken
        if taken:
            earlier |= item.stores
        else:
            earlier -= item.assigns
    return frozenset(found)


def _lines_of_models(context: ArmContext) -> set[tuple[str, int]]:
    """Return the lines that call a model, and the lines that call those."""
    lines = {(call.place.file, call.place.line) for call in context.module_calls if call.has_parameters}
    if context.stacks is not None:
        for path in context.stacks.paths:
            if path.phase == "forward":
                lines |= {(place.file, place.line) for place in path.places}
    return lines


# -- syntax trees


def _training_loops(node: ast.AST) -> Iterator[ast.For]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FUNCTIONS) and not runs_as_written(child):
            continue
        if isinstance(child, ast.For) and any(map(_holds_backward, child.body)):
            yield child  # a loop with .step() alone may step environments
        yield from _training_loops(child)


def _holds_backward(statement: ast.stmt) -> bool:
    """Return whether a statement contains `.backward()`, closures included."""
    return any(isinstance(node, ast.Attribute) and node.attr == "backward" for node in ast.walk(statement))


def _can_be_served(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return False
    if not _names_only(statement.targets[0]) or trains(statement):
        return False
    nodes = list(ast.walk(statement.value))
    return any(isinstance(node, (ast.Call, ast.Subscript)) for node in nodes) and not any(
        isinstance(node, (*LEAVES, ast.NamedExpr)) for node in nodes
    )


def _names_only(target: ast.expr) -> bool:
    if isinstance(target, (ast.Tuple, ast.List)):
        return all(map(_names_only, target.elts))
    return isinstance(target, ast.Name)


def _switched(statement: ast.stmt, number: int) -> ast.stmt:
    assert isinstance(statement, ast.Assign)
    target = ast.unparse(statement.targets[0])
    made: Any = ast.parse(
        f"if {SWITCH} is None or not {SWITCH}.serves({number}):\n"
        f"    pass\n"
        f"    if {SWITCH} is not None: {SWITCH}.keep({number}, ({target}))\n"
        f"else:\n"
        f"    {target} = {SWITCH}.give({number})\n"
    ).body[0]
    _placed(made, statement)
    made.body[0] = statement
    return made  # type: ignore[no-any-return]


def _watched(iterable: ast.expr) -> ast.expr:
    made: Any = ast.parse(f"{SWITCH}.watched(_) if {SWITCH} is not None else _", mode="eval").body
    _placed(made, iterable)
    made.body.args, made.orelse = [iterable], iterable  # only one of them is evaluated
    return made  # type: ignore[no-any-return]


def _placed(made: Any, original: ast.AST) -> Any:
    for node in ast.walk(made):
        ast.copy_location(node, original)
    return made


def _item(statement: ast.stmt, number: int | None) -> Item:
    return Item(
        first_line=statement.lineno,
        last_line=statement.end_lineno or statement.lineno,
        loads=frozenset(_exposed(statement)),
        stores=frozenset(_stored(statement)),
        number=number,
        is_loop=isinstance(statement, LOOPS),
        goes_back=_goes_back(statement),
        assigns=frozenset(_assigned(statement)),
        has_calls=any(isinstance(node, ast.Call) for node in ast.walk(statement)),
    )


def _goes_back(node: ast.AST) -> bool:
    """Return whether a node calls `.backward()`, inner loops excluded."""
    if isinstance(node, (*LOOPS, *FUNCTIONS, ast.ClassDef, ast.Lambda)):
        return False
    if isinstance(node, ast.Attribute) and node.attr == "backward":
        return True
    return any(map(_goes_back, ast.iter_child_nodes(node)))


def _exposed(statement: ast.stmt) -> set[str]:
    """Return the names that a statement reads before it assigns to them."""
    if not isinstance(statement, (ast.With, ast.For)):
        return _names(statement, ast.Load) | (
            _names(statement.target, ast.Store) if isinstance(statement, ast.AugAssign) else set()
        )
    names: set[str] = set()
    assigned: set[str] = set()
    if isinstance(statement, ast.For):
        names |= _names(statement.iter, ast.Load)
        assigned |= _names(statement.target, ast.Store)
    else:
        for item in statement.items:
            names |= {node.id for node in ast.walk(item) if isinstance(node, ast.Name)}
    for inner in statement.body:
        names |= _exposed(inner) - assigned
        assigned |= _assigned(inner)
    for inner in getattr(statement, "orelse", ()):
        names |= _exposed(inner)
    return names


def _assigned(statement: ast.stmt) -> set[str]:
    """Return the names that a statement assigns to in any case, if its loops run at all."""
    if isinstance(statement, (ast.With, ast.For)):
        header = _names(statement.target, ast.Store) if isinstance(statement, ast.For) else set()
        return header.union(*map(_assigned, statement.body))
    return _stored(statement) if isinstance(statement, ast.Assign) else set()


def _stored(statement: ast.stmt) -> set[str]:
    return _names(statement, ast.Store)


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    """Return the names that a node reads, or assigns to, without those a comprehension makes for itself."""
    inside = [each.target for part in ast.walk(node) for each in getattr(part, "generators", ())]
    own = {name.id for target in inside for name in ast.walk(target) if isinstance(name, ast.Name)}
    found = {
        each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, context)
    }
    return found - own
