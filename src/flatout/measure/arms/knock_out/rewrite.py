"""Compile a function's code with a switch around one of its blocks.

The whole file is parsed and compiled again, so that free variables, mangled names and line numbers match the
code that it replaces.  The new code asks an object in the module's globals: if that says no, the block runs
and its results are noted; otherwise the results come from that object.
"""

from __future__ import annotations

import ast
import linecache
import warnings
from collections.abc import Iterator
from types import CodeType
from typing import Any

from flatout.measure.arms.knock_out.blocks import (
    FUNCTIONS,
    Block,
    FunctionNode,
    find_function,
    find_statements,
)

KNOCK_OUT = "_flatout_knock_out"  # one underscore: a name that begins with two is mangled inside a class


class CannotRewrite(Exception):
    """Says why a function stays unchanged."""


def parse_file(path: str) -> ast.Module | None:
    """Parse a source file, or a notebook cell that `linecache` knows."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return ast.parse("".join(linecache.getlines(path)), path)
    except (SyntaxError, ValueError, RecursionError):
        return None


def rewritten(code: CodeType, path: str, block: Block) -> CodeType:
    """Return `code` with a switch around `block`, or raise CannotRewrite."""
    tree = parse_file(path)
    function = find_function(tree, code.co_name, code.co_firstlineno) if tree is not None else None
    if tree is None or function is None:
        raise CannotRewrite("its source is not the one that runs")
    try:
        _put_switch(function, block)
    except LookupError as error:
        raise CannotRewrite(str(error)) from None
    with warnings.catch_warnings(action="ignore"):
        module = compile(ast.fix_missing_locations(tree), code.co_filename, "exec", dont_inherit=True)
    wanted = _signature(code)
    for made in _codes(module):
        if _signature(made) == wanted:
            return made
    raise CannotRewrite("its source is not the one that runs")


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def _signature(code: CodeType) -> tuple[Any, ...]:
    """Return what two code objects must share if one replaces the other."""
    num_arguments = code.co_argcount + code.co_kwonlyargcount
    return (code.co_qualname, code.co_firstlineno, code.co_freevars, code.co_varnames[:num_arguments])


def _put_switch(function: FunctionNode, block: Block) -> None:
    suite, first = find_statements(function, block)
    run = suite[first : first + block.num_statements]
    give: list[ast.stmt] = [bind(block.results)]
    if block.is_tail:
        give.append(ast.Return(call(KNOCK_OUT, "give_returned")))
        ended: list[Any] = [_NoteReturns().visit(statement) for statement in run]
        ended.append(ast.Return(call(KNOCK_OUT, "note_returned", ast.Constant(None))))
        made = [ast.If(call(KNOCK_OUT, "is_free"), give, []), *ended]
    else:
        made = [ast.If(call(KNOCK_OUT, "is_free"), give, [*run, ast.Expr(call(KNOCK_OUT, "note"))])]
    for statement in made:
        if statement not in run:
            locate(statement, run[0])
    suite[first : first + block.num_statements] = made


def bind(results: tuple[str, ...], asked: str = KNOCK_OUT) -> ast.stmt:
    if not results:
        return ast.Expr(call(asked, "give"))
    targets: list[ast.expr] = []
    for result in results:
        name, _, attribute = result.partition(".")
        if attribute:
            targets.append(ast.Attribute(ast.Name(name, ast.Load()), attribute, ast.Store()))
        else:
            targets.append(ast.Name(name, ast.Store()))
    return ast.Assign([ast.Tuple(targets, ast.Store())], call(asked, "give"))


def call(asked: str, method: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Attribute(ast.Name(asked, ast.Load()), method, ast.Load()), list(arguments), [])


def locate(made: ast.AST, original: ast.stmt) -> None:
    """Give new nodes the line numbers of the block's first statement."""
    if isinstance(made, (ast.expr, ast.stmt)) and not hasattr(made, "lineno"):
        ast.copy_location(made, original)
    for child in ast.iter_child_nodes(made):
        locate(child, original)


class _NoteReturns(ast.NodeTransformer):
    """Makes every `return` of a function note its value."""

    def visit_Return(self, node: ast.Return) -> ast.Return:
        value = call(KNOCK_OUT, "note_returned", node.value or ast.Constant(None))
        made = ast.copy_location(ast.Return(value), node)
        locate(made, node)
        return made

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
            return node
        visited: ast.AST = super().visit(node)
        return visited
