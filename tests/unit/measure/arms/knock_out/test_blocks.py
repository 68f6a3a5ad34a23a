from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

from flatout.measure.arms.knock_out.blocks import (
    Block,
    find_function,
    find_statements,
    inner_blocks,
    whole_block,
)


def parsed(source: str) -> tuple[Any, ast.Module]:
    """The first function of a source, and the tree."""
    tree = ast.parse(textwrap.dedent(source))
    function = next(
        node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )
    return function, tree


def inside(source: str) -> list[Block]:
    function, tree = parsed(source)
    return inner_blocks(function, whole_block(function, tree), tree)


ROWS = """
def forward(self, x):
    "A docstring is no block."
    hidden = self.embed(x)
    rows = []
    for i in range(len(x)):
        rows.append(self.cell(hidden[i]))
    joined = torch.stack(rows)
    scale = joined.norm()
    return joined / scale
"""


def test_a_list_that_a_loop_fills_is_used_inside_the_block() -> None:
    embed, loop, *_ = inside(ROWS)
    assert (embed.first_line, embed.last_line, embed.results) == (4, 4, ("hidden",))
    assert (loop.first_line, loop.last_line) == (6, 8)
    assert loop.results == ("joined",)
    assert "hidden" in loop.inputs and "torch" not in loop.inputs


def test_the_whole_function_returns_its_result() -> None:
    function, tree = parsed(ROWS)
    block = whole_block(function, tree)
    assert (block.first_line, block.start[0], block.last_line) == (2, 4, 10)
    assert block.is_tail and block.results == () and block.refusal is None


def test_a_run_that_ends_the_function_is_its_tail() -> None:
    blocks = inside("def f(xs):\n    rows = [g(x) for x in xs]\n    return torch.stack(rows)\n")
    assert [(block.first_line, block.last_line) for block in blocks] == []
    blocks = inside(
        "def f(xs):\n    xs = g(xs)\n    rows = [g(x) for x in xs]\n    return torch.stack(rows)\n"
    )
    assert [(block.first_line, block.last_line, block.is_tail) for block in blocks] == [
        (2, 2, False),
        (3, 4, True),
    ]


@pytest.mark.parametrize(
    ("statements", "results"),
    [
        ("y = [n for n in x]; z = g(y)", {"z"}),  # the variable of a comprehension is its own
        ("z = g(x); self.hidden = g(z)", {"z", "self.hidden"}),
        ("z = g(x); z[0] = 1", {"z"}),
        ("z, (k, *rest) = g(x)", {"z"}),
        ("z = (k := g(x)) + 1", {"z"}),
        ("for k in g(x): z = k", {"z"}),
    ],
)
def test_results_are_what_others_read_and_what_stays(statements: str, results: set[str]) -> None:
    blocks = inside(
        f"def f(self, x):\n    x = h(x)\n    {statements.replace('; ', chr(10) + '    ')}\n    return z\n"
    )
    assert results <= {name for block in blocks for name in block.results}
    assert not {"n", "rest"} & {name for block in blocks for name in block.results}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("yield g(x)", "a generator"),
        ("loss = g(x)\n    loss.backward()", "it trains, or steps an environment"),
        ("torch.save(g(x), 'x.pt')", "it writes or opens files"),
        ("helper(x)", "it writes or opens files"),
        ("global y\n    y = g(x)", "it binds names of another scope"),
        ("import numpy\n    return g(x)", "it imports or deletes names"),
        ("return x", "it computes nothing"),
    ],
)
def test_what_has_effects_outside_is_left_alone(body: str, reason: str) -> None:
    function, tree = parsed(f"def f(x):\n    {body}\n\ndef helper(x):\n    open('log').write(x)\n")
    assert reason in (whole_block(function, tree).refusal or "")


def test_what_is_asynchronous_is_left_alone() -> None:
    function, tree = parsed("async def f(x):\n    return await g(x)\n")
    assert whole_block(function, tree).refusal == "it is asynchronous"


def test_what_a_loop_does_before_it_fills_a_list_is_a_block_of_its_own() -> None:
    source = """
    def f(xs):
        rows = []
        for x in xs:
            y = g(x)
            rows.append(y)
        return cat(rows)
    """
    function, tree = parsed(source)
    (loop,) = inner_blocks(function, whole_block(function, tree), tree)
    assert (loop.first_line, loop.last_line, loop.is_tail) == (4, 7, True)
    (call,) = inner_blocks(function, loop, tree)
    assert (call.first_line, call.last_line, call.results) == (5, 5, ("y",))


def test_statements_of_one_line_are_one_block_if_they_can_be() -> None:
    found = inside(
        """
        def step(self, x):
            first = self.a(x); second = self.b(first)
            third = self.c(second); optimizer.step(); fourth = self.d(third)
            return fourth
        """
    )
    assert [(block.first_line, block.num_statements, block.refusal) for block in found[:3]] == [
        (3, 2, None),
        (4, 1, None),
        (4, 1, None),
    ]


def test_a_branch_that_leaves_the_function_is_opened() -> None:
    source = "def f(x):\n    if len(x):\n        x = g(x)\n        return x\n    x = h(x)\n    return x\n"
    assert [(block.first_line, block.is_tail) for block in inside(source)] == [(3, False), (5, False)]


def test_a_block_is_found_again_in_another_tree() -> None:
    function, tree = parsed(ROWS)
    loop = inner_blocks(function, whole_block(function, tree), tree)[1]
    again, _ = parsed(ROWS)
    suite, position = find_statements(again, loop)
    assert isinstance(suite[position], ast.For)


def test_functions_are_found_by_the_first_line_of_their_code() -> None:
    tree = ast.parse("@decorated\n@twice\ndef f():\n    pass\n\ndef f():\n    pass\n")
    first, second = find_function(tree, "f", 1), find_function(tree, "f", 6)
    assert first is not None and second is not None and first is not second
    assert find_function(tree, "f", 3) is None


@pytest.mark.parametrize(
    ("statements", "inputs"),
    [
        ("y = g(x)\n    z = h(y)", {"x"}),
        ("h = cell(x, h)", {"x", "h"}),
        ("total += g(x)", {"total", "x"}),
        ("for x in xs:\n        y = g(x)", {"xs"}),
        ("y = [g(x) for x in xs]", {"xs"}),
    ],
)
def test_inputs_are_what_is_read_before_it_is_bound(statements: str, inputs: set[str]) -> None:
    function, tree = parsed(f"def f(x, xs, h, total, y):\n    {statements}\n    return y, h, total\n")
    assert set(whole_block(function, tree).inputs) >= inputs
    assert {"y", "z"} & set().union(*(block.inputs for block in inside(ast.unparse(function))[:1])) == set()


def test_a_file_whose_functions_all_call_each_other_is_looked_through_once() -> None:
    names = [f"part_{number}" for number in range(150)]
    body = "\n".join(f"    {name}(x)" for name in names)
    source = "\n".join(f"def {name}(x):\n{body}\n    return x\n" for name in names)
    tree = ast.parse(source)
    function: Any = tree.body[0]
    assert whole_block(function, tree).refusal is None
    tree = ast.parse(source + "def part_7(x):\n    x.save()\n")
    function = tree.body[0]
    assert whole_block(function, tree).refusal == "it writes or opens files"


def test_a_function_of_many_statements_is_not_walked_anew_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    visits, children = [0], ast.iter_child_nodes

    def counted(node: ast.AST) -> Iterator[ast.AST]:
        visits[0] += 1
        return children(node)

    def num_visits(num_statements: int) -> int:
        lines = "".join(f"    x = x + layer{number}(x)\n" for number in range(num_statements))
        function, tree = parsed(f"def forward(x):\n{lines}    return x\n")
        visits[0] = 0
        assert len(inner_blocks(function, whole_block(function, tree), tree)) == num_statements
        return visits[0]

    monkeypatch.setattr(ast, "iter_child_nodes", counted)
    assert num_visits(80) < 3 * num_visits(40)
