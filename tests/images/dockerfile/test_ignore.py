"""Ignore files."""

import pytest

from prorl_envs.images.dockerfile.ignore import IgnoreRules, glob_expression


@pytest.mark.parametrize(
    ("lines", "excluded", "included"),
    [
        (["*.md"], ["a.md"], ["d/a.md", "a.mdx"]),
        (["**/*.md"], ["a.md", "d/e/a.md"], ["a.txt"]),
        (["d"], ["d", "d/a", "d/e/f"], ["dd", "e/d"]),
        (["/d/"], ["d/a"], ["e"]),
        (["d/**"], ["d/a", "d/e/f"], ["d"]),
        (["a?c"], ["abc"], ["ac", "a/c"]),
        (["[ab].x"], ["a.x", "b.x"], ["c.x"]),
        (["[^ab].x"], ["c.x"], ["a.x"]),
        (["*", "!keep"], ["a", "d/a"], ["keep", "keep/a"]),
        (["*.md", "!README.md", "README.md"], ["README.md"], []),
        (["d", "!d/keep"], ["d/a"], ["d/keep", "d/keep/x"]),
        (["# comment", "", "  a  "], ["a"], ["# comment"]),
        (["../a", "./b"], ["a", "b"], []),
    ],
)
def test_rules(lines: list[str], excluded: list[str], included: list[str]) -> None:
    rules = IgnoreRules(lines)
    assert [path for path in excluded if not rules.excludes(path)] == []
    assert [path for path in included if rules.excludes(path)] == []


def test_patterns_with_two_stars() -> None:
    assert glob_expression("a/**/b").fullmatch("a/b")
    assert glob_expression("a/**/b").fullmatch("a/x/y/b")
    assert not glob_expression("a/**/b").fullmatch("ab")
    assert glob_expression("\\*").fullmatch("*")
