"""Blocks of code in the text of a model."""

import pytest

from prorl_envs.envs.code.code_block import last_code

_DOCUMENTED = "def f():\n    '''\n    ```python\n    f()\n    ```\n    ```\n    3\n    ```\n    '''"
_NARROW = _DOCUMENTED.replace("    ", "  ")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```", "a\n"),
        ("```\na\n```\nno:\n```py\nb\n```", "b\n"),
        ("```python\na\n```\n```text\nb\n```", "a\n"),
        ("```\na\n```\n```\nb\n```", "b\n"),
        ("```python\na\n```\nIt prints\n```\n3\n```", "a\n"),
        ("```python\na\n```\n```Python3\nb\n```\n```\n3\n```", "b\n"),
        ("```python\na\n```\n```python\n\n```", "a\n"),
        ("```text\na\n```", ""),
        # the text after the marks
        ('```python title="a.py"\na\n```', "a\n"),
        ("``` python\na\n```", "a\n"),
        ("```python:src/a.py\na\n```", "a\n"),
        ("```{.python .numberLines}\na\n```\n```\n3\n```", "a\n"),
        ("```python{1,3}\na\n```\n```\n3\n```", "a\n"),
        ("```python3.12\na\n```\n```\n3\n```", "a\n"),
        ("```solution.py\na\n```\n```\n3\n```", "a\n"),
        ('```title="a.py"\na\n```', "a\n"),
        ("```pycon\n>>> 1\n```", ""),
        ("```cython\na\n```", ""),
        ("```python print(1)```\n```\nb\n```", "b\n"),
        # tildes and longer fences
        ("~~~python\na\n~~~", "a\n"),
        ("~~~ python\n```\na\n```\n~~~", "```\na\n```\n"),
        ("````python\nd = '''\n```python\nb\n```\n'''\n````", "d = '''\n```python\nb\n```\n'''\n"),
        ("```python\na\n````", "a\n"),
        ("```python\na\n~~~", ""),
        # fences in docstrings
        (f"```python\n{_DOCUMENTED}\n```", f"{_DOCUMENTED}\n"),
        (f"```python\n{_NARROW}\n```", f"{_NARROW}\n"),
        (f"```python\n{_DOCUMENTED}\n```\nIt prints\n```\n3\n```", f"{_DOCUMENTED}\n"),
        # indentation
        ("  ```python\n  a\n  ```", "a\n"),
        ("  ```python\n  a\n    b\nc\n```", "a\n  b\nc\n"),
        ("1. So:\n\n    ```python\n    a\n      b\n    ```\n\n    ```\n    3\n    ```", "a\n  b\n"),
        ("\t```python\n\ta\n\t\tb\n\t```", "a\n\tb\n"),
        ("- ```python\n  a\n  ```", "a\n"),
        ("```python\na\n ```", "a\n"),
        ("```python\na\n ```\nor\n```python\nb\n```", "b\n"),
        ("```python\r\na\r\n```\r\n", "a\r\n"),
        ("```python\na = '\u2028```'\n```", "a = '\u2028```'\n"),
        ("```python\na\n  ```\nb\n  ```\n", "a\n"),
        ("```python\na\n ```\n```text\nb\n```", "a\n"),
        ("```\na\n```\nb\n ```", "a\n"),
        ("```\na\n```\n```\n\n```", "a\n"),
        # blocks that are not closed
        ("```python\na\n  ```text\nb", ""),
        ("```python\na\n  - ```\nb", ""),
        ("- ```\n  a\n- ```\n  b\n  ```", "b\n"),
        ("```python\na\nBetter:\n```python\nb\n```", "b\n"),
        ("```markdown\n```python\na\n```\n```", "a\n"),
        ("```python\na", ""),
        ("<think>\n```python\na\n```", ""),
        ("<think>\n```python\na\n```\n</think>\n```python\nb\n```", "b\n"),
        ("", ""),
        ("```x\n" * 50_000, ""),
        ("`" * 199_000 + "x`", ""),
        ("```" + "a" * 100_000 + "=\na\n```", "a\n"),
        ("".join(f"{' ' * n}{'`' * (603 - n)}x\n" for n in range(600)), ""),
    ],
)
def test_the_last_block_of_python(text: str, code: str) -> None:
    assert last_code(text) == code
