"""Parser of Dockerfiles: see the Dockerfile reference."""

import pytest

from prorl_envs.images.dockerfile.parser import (
    DockerfileError,
    Instruction,
    parse_dockerfile,
)
from prorl_envs.images.dockerfile.stages import plan_build

AMD = "linux/amd64"


def parse(text: str) -> list[Instruction]:
    """Return the instructions after `FROM base`."""
    return list(parse_dockerfile(f"FROM base\n{text}").instructions[1:])


@pytest.mark.parametrize(
    ("text", "joined"),
    [
        ("RUN a b", "a b"),
        ("run a", "a"),
        ("  RUN\ta  ", "a"),
        ("RUN a \\\n  b", "a   b"),
        ("RUN a \\  \n b", "a  b"),
        ("RUN a \\\n# comment\n b", "a  b"),
        ("RUN a \\\n   # comment\n\n b", "a  b"),
        ("RUN echo '#' # not a comment", "echo '#' # not a comment"),
        ("RUN a\\\\", "a\\\\"),
        ("RUN \\\na", "a"),
        ("RUN a \\", "a"),
        ("RUN a\r\n", "a"),
    ],
)
def test_lines_are_joined(text: str, joined: str) -> None:
    assert [one.text for one in parse(text)] == [joined]


def test_comments_and_empty_lines_are_skipped_and_lines_are_counted() -> None:
    found = parse("# c\n\n  # d\nRUN a \\\n b\nENV x=y")
    assert [(one.name, one.line) for one in found] == [("RUN", 5), ("ENV", 7)]


def test_the_escape_directive_changes_the_continuation() -> None:
    file = parse_dockerfile("# syntax=docker/dockerfile:1\n# escape=`\nFROM base\nRUN a `\n b\\\nRUN c")
    assert [one.text for one in file.instructions] == ["base", "a  b\\", "c"]
    assert file.escape == "`"


def test_a_directive_after_a_comment_is_a_comment() -> None:
    assert parse_dockerfile("# c\n# escape=`\nFROM base").escape == "\\"


@pytest.mark.parametrize(
    ("text", "content", "expands"),
    [
        ("RUN cat <<EOF\na\n# b\nEOF", "a\n# b\n", True),
        ("RUN cat <<'EOF' > /x\n$a\nEOF", "$a\n", False),
        ('RUN cat <<"EOF"\n$a\nEOF', "$a\n", False),
        ("RUN cat <<-EOF\n\ta\n\t\tb\n\tEOF", "a\nb\n", True),
        ("RUN cat > /x << 'EOF'\nname: x\nEOF", "name: x\n", False),
        ("COPY <<EOF /x\n\nEOF", "\n", True),
    ],
)
def test_documents(text: str, content: str, expands: bool) -> None:
    (found,) = parse(text)
    (document,) = found.heredocs
    assert (document.content, document.expands) == (content, expands)


def test_several_documents_follow_each_other() -> None:
    found = parse("COPY <<a <<b /d/\nb\na\na\nb\nRUN x")
    assert [(one.name, one.content) for one in found[0].heredocs] == [("a", "b\n"), ("b", "a\n")]
    assert found[1].text == "x"


@pytest.mark.parametrize(
    "text",
    ['RUN echo "a <<EOF"', "RUN echo $((1<<2)) $(( 1 << 2 ))", 'RUN ["cat", "<<EOF"]', "RUN cat <<< x"],
)
def test_text_that_is_not_a_document(text: str) -> None:
    (found,) = parse(text)
    assert found.heredocs == ()


def test_flags_and_json_forms() -> None:
    copy, run = parse(
        'COPY --from=a --chmod=755 ["a b", "/c/"]\nRUN --mount=type=cache,target=/c --mount=x a'
    )
    assert copy.flags == (("from", "a"), ("chmod", "755"))
    assert copy.items == ("a b", "/c/")
    assert [value for name, value in run.flags] == ["type=cache,target=/c", "x"]
    assert run.text == "a"


def test_text_that_is_not_json_is_the_shell_form() -> None:
    assert parse("RUN ['a']")[0].items is None
    assert parse('RUN [ -f "x" ] && y')[0].items is None


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        ("FRM x", 2, "did you mean FROM?"),
        ("RUN", 2, "needs an argument"),
        ("\nONBUILD RUN x", 3, "not supported"),
        ("COPY --frm=x a b", 2, "unknown flag --frm"),
        ("RUN cat <<EOF\na", 2, "has no end"),
    ],
)
def test_errors_name_the_line(text: str, line: int, part: str) -> None:
    with pytest.raises(DockerfileError) as raised:
        parse(text)
    assert raised.value.line == line
    assert part in str(raised.value)


@pytest.mark.parametrize("text", ["", "# only a comment", "ARG x"])
def test_without_from_there_is_nothing_to_build(text: str) -> None:
    with pytest.raises(DockerfileError, match="no FROM"):
        parse_dockerfile(text)


def test_a_zero_byte_is_refused() -> None:
    with pytest.raises(DockerfileError, match="zero byte"):
        parse("WORKDIR /\0")


def stages(text: str, target: str | None = None, **args: str) -> list[tuple[int, str, str]]:
    plan = plan_build(parse_dockerfile(text), args, platform=AMD, target=target)
    return [(stage.index, stage.name, stage.base) for stage in plan.stages]


def test_only_the_stages_that_the_target_needs_are_built() -> None:
    text = "FROM a AS one\nFROM b as Two\nFROM c AS three\nCOPY --from=0 x y\nFROM one\nRUN z"
    assert stages(text) == [(0, "one", "a"), (3, "", "one")]
    assert stages(text, "three") == [(0, "one", "a"), (2, "three", "c")]
    assert stages(text, "TWO") == [(1, "two", "b")]
    assert stages(text, "1") == [(1, "two", "b")]


def test_a_mount_needs_its_stage() -> None:
    text = "FROM a AS one\nFROM b\nRUN --mount=from=one,target=/x y"
    assert [index for index, _, _ in stages(text)] == [0, 1]


def test_arguments_before_from() -> None:
    text = "ARG v=1\nARG name=x:${v}\nFROM ${name}-$TARGETARCH"
    assert stages(text) == [(0, "", "x:1-amd64")]
    assert stages(text, v="2") == [(0, "", "x:2-amd64")]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("RUN x\nFROM a", "before the first FROM"),
        ("FROM $none", "is empty"),
        ("FROM a b", "needs an image"),
        ("FROM a AS x\nFROM b AS x", "another stage"),
        ("FROM a AS ..", "cannot be the name"),
        ("FROM a\nRUN --mount=type=ssh x", "type=ssh is not supported"),
        ("FROM a\nRUN --mount=bogus=1 x", "no option bogus"),
    ],
)
def test_wrong_stages(text: str, part: str) -> None:
    with pytest.raises(DockerfileError, match=part):
        stages(text)


def test_a_missing_target_lists_the_stages() -> None:
    with pytest.raises(DockerfileError, match="did you mean one"):
        stages("FROM a AS one", "on")
