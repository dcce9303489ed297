"""Variables and quotes of Dockerfiles."""

import pytest

from prorl_envs.images.dockerfile.expand import (
    EXPANDED_LIMIT,
    ExpansionError,
    expand,
    split_words,
)

VARIABLES = {"a": "1", "empty": "", "path": "/x/y.tar.gz", "two": "b c"}


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("$a", "1"),
        ("${a}b", "1b"),
        ("$ab", ""),
        ("x$", "x$"),
        ("$a$a", "11"),
        ("\\$a", "$a"),
        ("'$a'", "$a"),
        ('"$a"', "1"),
        ('"\\$a \\" \\n"', '$a " \\n'),
        ("a\\ b", "a b"),
        ("${a:-x}${empty:-x}${none:-x}", "1xx"),
        ("${empty-x}${none-x}", "x"),
        ("${a:+x}${empty:+x}${none:+x}", "x"),
        ("${empty+x}${none+x}", "x"),
        ("${none:-${a}}", "1"),
        ("${none:-'$a'}", "$a"),
        ("${path#*/}", "x/y.tar.gz"),
        ("${path##*/}", "y.tar.gz"),
        ("${path%.*}", "/x/y.tar"),
        ("${path%%.*}", "/x/y"),
        ("${path/x/z}", "/z/y.tar.gz"),
        ("${path//r/}", "/x/y.ta.gz"),
        ("${two}", "b c"),
        ("$12x${34}${56:-y}", "xy"),
        ("a\\", "a"),
    ],
)
def test_expand(text: str, expanded: str) -> None:
    assert expand(text, VARIABLES) == expanded


@pytest.mark.parametrize("text", ["'a", '"a', "${a", "${}", "${none:?is missing}", "${a^^}"])
def test_incomplete_texts(text: str) -> None:
    with pytest.raises(ExpansionError):
        expand(text, VARIABLES)


def test_documents_keep_their_quotes() -> None:
    assert expand("'$a' \"x\" \\$a \\n", VARIABLES, keep_quotes=True) == "'1' \"x\" $a \\n"


def test_the_escape_character_can_be_another() -> None:
    assert expand("c:\\x `$a", VARIABLES, escape="`") == "c:\\x $a"


def test_words() -> None:
    assert split_words("a 'b c'  d\\ e \"f 'g\"") == ["a", "'b c'", "d\\ e", '"f \'g"']


def test_growth_and_nesting_are_bounded() -> None:
    with pytest.raises(ExpansionError, match="expands to more"):
        expand("$x" * 100, {"x": "y" * (EXPANDED_LIMIT // 50)})
    with pytest.raises(ExpansionError, match="nested"):
        expand("${n:-" * 50 + "}" * 50, {})
