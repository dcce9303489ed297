"""Optimisations of the cells' shell over IPython, which must not be observable."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from IPython.core.inputtransformer2 import TransformerManager

from prorl_envs.tools.client.toolbox import Toolbox
from prorl_envs.tools.server.python_kernel import Transformers

pytestmark = pytest.mark.anyio
T = 60.0
PIECES = [
    "x",
    "=",
    " ",
    "\n",
    "%pwd",
    "!ls",
    "?",
    ";",
    ",",
    "/",
    "str 1",
    "'%'",
    "(",
    ")",
    "#",
    "    ",
    ":",
    "if",
]


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
@example("x = %pwd")
@example("if x:\n    !ls\n")
@example("(1,\n 2)")
@example("  ,str 1")
def test_cells_are_read_as_ipython_reads_them(cell: str) -> None:
    def outcome(manager: TransformerManager) -> str:
        try:
            return manager.transform_cell(cell)
        except SyntaxError as error:
            return type(error).__name__

    theirs = outcome(TransformerManager())  # type: ignore[no-untyped-call]
    assert outcome(Transformers()) == theirs or theirs.endswith("Error")


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        ("x = !echo 4\nx", "['4']\n"),
        (",print a b", "a b\n"),
        ("1;", ""),
        ("'a;b'", "'a;b'\n"),
        ("import asyncio\n[x async for x in _each()]", "[0]\n"),
        ("_ih[-1]", "'_ih[-1]'\n"),
    ],
)
async def test_a_cell_means_the_same_as_in_ipython(python_box: Toolbox, cell: str, text: str) -> None:
    await python_box.python("async def _each():\n    yield 0", timeout_s=T)
    assert (await python_box.python(cell, timeout_s=T)).text == text


async def test_a_user_defined_transformer_sees_every_cell(python_box: Toolbox) -> None:
    code = (
        "from IPython.core.inputtransformer2 import TokenTransformBase\n"
        "class Twice(TokenTransformBase):\n"
        "    @classmethod\n"
        "    def find(cls, lines):\n"
        "        return next((cls(t.start) for line in lines for t in line if t.string == 'once'), None)\n"
        "    def transform(self, lines):\n"
        "        return [line.replace('once', 'two') for line in lines]\n"
        "two = 2\n"
        "get_ipython().input_transformer_manager.token_transformers.append(Twice)"
    )
    await python_box.python(code, timeout_s=T)
    assert (await python_box.python("once", timeout_s=T)).text == "2\n"


async def test_printed_output_is_not_kept(python_box: Toolbox) -> None:
    code = "print('x' * 10)\nlen(get_ipython().history_manager.outputs)"
    assert (await python_box.python(code, timeout_s=T)).text == "xxxxxxxxxx\n0\n"
    await python_box.python("1 / 0", timeout_s=T)
    code = "get_ipython().history_manager.exceptions"
    assert "ZeroDivision" not in (await python_box.python(code, timeout_s=T)).text


async def test_old_outputs_are_discarded_without_a_message(python_box: Toolbox) -> None:
    await python_box.python("get_ipython().displayhook.cache_size = 4", timeout_s=T)
    shown = [(await python_box.python(f"{value} + 0", timeout_s=T)).text for value in range(8)]
    assert shown == [f"{value}\n" for value in range(8)]
    assert (await python_box.python("len(Out) <= 4, Out[max(Out)]", timeout_s=T)).text == "(True, 7)\n"
