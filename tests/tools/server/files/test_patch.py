"""Patches without files: parsing, placement of hunks, and refusals."""

import difflib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.tools.server.files import patch_match
from prorl_envs.tools.server.files.patch import Add, Delete, Hunk, Update, parse
from prorl_envs.tools.server.files.patch_match import patched
from prorl_envs.tools.server.files.text import EditError, Text, checked, decode

LINES = st.lists(st.sampled_from(["a", "b", "", "  c", "--- x", "-- x", "++ y", "+y", "é"]), max_size=12)


def envelope(*lines: str) -> str:
    return "\n".join(["*** Begin Patch", *lines, "*** End Patch"])


def update(content: str, *lines: str) -> str:
    [change] = parse(envelope("*** Update File: f", *lines))
    assert isinstance(change, Update)
    return patched(Text(content), change.hunks)


def text_of(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def test_each_kind_of_change_is_parsed() -> None:
    changes = parse(
        envelope(
            "*** Add File: a b/new.py",
            "+one",
            "+",
            "*** Delete File: old",
            "*** Update File: x",
            "*** Move to: y",
            "@@ class A:",
            "@@     def f():",
            " keep",
            "-go",
            "+come",
            "*** End of File",
        )
    )
    hunk = Hunk(["class A:", "def f():"], [(" ", "keep"), ("-", "go"), ("+", "come")], at_end=True)
    assert changes == [Add("a b/new.py", "one\n\n"), Delete("old"), Update("x", "y", [hunk])]


@pytest.mark.parametrize(
    ("first", "last"),
    [
        ("```", "```"),
        ("```diff", "```"),
        ("~~~~patch", "~~~~"),
        ("<<EOF", "EOF"),
        ("apply_patch <<'EOF'", "EOF"),
        ('apply_patch <<-"PATCH"', "PATCH"),
        ("apply_patch <<'EOF'\n```", "```\nEOF\n"),
    ],
)
@pytest.mark.parametrize(
    "patch", [envelope("*** Add File: f", "+```"), "--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+```"]
)
def test_a_patch_in_a_fence_or_here_document_is_taken_out(patch: str, first: str, last: str) -> None:
    assert parse(f"{first}\n{patch}\n{last}") == parse(patch) == [Add("f", "```\n")]


@pytest.mark.parametrize(
    ("first", "last"),
    [("```", ""), ("```", "~~~"), ("<<'EOF'", "PATCH"), ("<<'EOF", "EOF"), ("rm -r x; cat <<EOF", "EOF")],
)
def test_other_text_around_a_patch_is_refused(first: str, last: str) -> None:
    with pytest.raises(EditError, match="must begin with"):
        parse(f"{first}\n{envelope('*** Add File: f', '+x')}\n{last}")


@given(LINES, LINES)
def test_a_whole_file_hunk_makes_the_new_file(old: list[str], new: list[str]) -> None:
    body = list(difflib.ndiff(old, new))
    lines = [line[0] + line[2:] for line in body if line[0] != "?"]
    if old == new or all(line[0] == " " for line in lines):
        return
    assert update(text_of(old), "@@", *lines, "*** End of File") == text_of(new)


@given(LINES, LINES, st.integers(0, 3), st.booleans())
def test_a_unified_diff_makes_the_new_file(
    old: list[str], new: list[str], context: int, newline: bool
) -> None:
    before, after = text_of(old), text_of(new)
    if not newline:
        before, after = before.removesuffix("\n"), after.removesuffix("\n")
    diff = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), "a/f", "b/f", n=context
    )
    patch = "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in diff
    )
    if not patch:
        return
    [change] = parse(patch)
    assert isinstance(change, Update)
    assert patched(Text(before), change.hunks) == after


HUNK = "@@ -1,3 +1,3 @@\n select 1;\n--- x\n+++ y\n select 2;\n"
AFTER = "select 1;\n++ y\nselect 2;\n"


@pytest.mark.parametrize(
    ("before", "patch", "after"),
    [
        ("select 1;\n-- x\nselect 2;\n", f"--- a/f\n+++ b/f\n{HUNK}", AFTER),
        ("-- x\n", "--- a/f\n+++ b/f\n@@ -1 +1 @@\n--- x\n+++ y", "++ y\n"),
        ("-- x", "--- f\n+++ f\n@@ -1 +1 @@\n--- x\n\\ No newline at end of file\n+++ y\n", "++ y\n"),
        ("-- w\n-- x\nz\n", "--- a/f\n+++ b/f\n@@ -1,2 +1 @@\n--- w\n--- x\n+++ y\n", "++ y\nz\n"),
        (
            "-- x\na\nb\nc\n-- x\n",
            "--- a/f\n+++ b/f\n@@ -1 +1 @@\n--- x\n+++ y\n@@ -5 +5 @@\n--- x\n+++ z\n",
            "++ y\na\nb\nc\n++ z\n",
        ),
        # Wrong counts: the lines are changes as long as no heading follows.
        ("a\n", "--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n-- \n2.39.2\n", "b\n"),
        ("- \na\n", "--- a/f\n+++ b/f\n@@ -1,2 +1 @@\n-- \n a\n", "a\n"),
        ("-- x\na\n", "--- a/f\n+++ b/f\n@@ -1,9 +1,9 @@\n--- x\n+++ y\n a\n", "++ y\na\n"),
    ],
)
def test_changed_lines_that_look_like_a_header_are_no_header(before: str, patch: str, after: str) -> None:
    [change] = parse(patch)
    assert isinstance(change, Update)
    assert patched(decode(before.encode()), change.hunks) == after


@pytest.mark.parametrize("path", ["g", "-- x"])
@pytest.mark.parametrize("counts", ["-1,2 +1,2", "-1,3 +1,3", "-1,9 +1,9", "-1,2 +1,9", "-1 +1", "-1,0 +1,0"])
@pytest.mark.parametrize("between", ["", "diff --git a/g b/g\n", "\n"])
def test_a_wrong_count_does_not_hide_the_next_file(path: str, counts: str, between: str) -> None:
    second = f"--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-c\n+d\n"
    changes = parse(f"--- a/f\n+++ b/f\n@@ {counts} @@\n-a\n+A\n b\n{between}{second}")
    paths = [(change.path, len(change.hunks)) for change in changes if isinstance(change, Update)]
    assert paths == [("f", 1), (path, 1)]


@pytest.mark.parametrize(("before", "after"), [("a\nb", "a\nb\n"), ("a\nb\n", "a\nb")])
def test_a_unified_diff_adds_and_removes_the_newline_at_the_end(before: str, after: str) -> None:
    old, new = (f"{sign}b\n" + no_newline(text) for sign, text in (("-", before), ("+", after)))
    [change] = parse(f"--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n a\n{old}{new}")
    assert isinstance(change, Update)
    assert patched(Text(before), change.hunks) == after


def no_newline(text: str) -> str:
    return "" if text.endswith("\n") else "\\ No newline at end of file\n"


@given(st.text(alphabet="*@+- \\\nab", max_size=60), st.text(alphabet="ab \r\n", max_size=30))
def test_any_text_is_applied_or_refused(patch: str, content: str) -> None:
    for text in (patch, envelope("*** Update File: f", patch), f"--- a/f\n+++ b/f\n@@ -1 +1 @@\n{patch}"):
        try:
            for change in parse(text):
                if isinstance(change, Update):
                    patched(decode(content.encode()), change.hunks)
        except EditError:
            continue


def test_hunks_are_placed_in_order_after_their_anchors() -> None:
    content = "def f():\n    return 1\n\ndef g():\n    return 1\n"
    assert update(content, "@@ def g():", "-    return 1", "+    return 2").endswith("g():\n    return 2\n")
    both = update(content, "@@", "-    return 1", "+    return 2", "@@", "-    return 1", "+    return 3")
    assert both == "def f():\n    return 2\n\ndef g():\n    return 3\n"


def test_an_anchor_is_found_whatever_its_indentation() -> None:
    content = "class A:\n    def f(self):\n        x = 1\n"
    assert "x = 2" in update(content, "@@ class A:", "@@ def f(self):", "-        x = 1", "+        x = 2")


def test_a_hunk_is_placed_after_its_anchor() -> None:
    assert update("x\nf\nx\n", "@@ f", "-x", "+y") == "x\nf\ny\n"
    with pytest.raises(EditError, match="only before line 3"):
        update("x\nf\n", "@@ f", "-x", "+y")
    with pytest.raises(EditError, match="no line after line 1 is"):
        update("f\nx\n", "@@ f", "@@ f", "-x", "+y")


@pytest.mark.parametrize("hint", [0, 1, 2])
def test_of_several_places_the_nearest_to_the_expected_line_is_used(hint: int) -> None:
    hunk = Hunk(lines=[("-", "a"), ("+", "b")], hint=hint)
    nearest = ["a", "a", "a"]
    nearest[hint] = "b"
    assert patched(decode(b"a\na\na\n"), [hunk]) == "\n".join(nearest) + "\n"


def test_a_byte_order_mark_and_line_ends_are_unchanged() -> None:
    marked = decode(b"\xef\xbb\xbfa\r\nb\r\n")
    assert (marked.content, marked.marked, marked.crlf) == ("a\r\nb\r\n", True, True)
    assert marked.encode("c") == b"\xef\xbb\xbfc" and decode(b"a").encode("c") == b"c"
    assert marked.fitted("x\ny\r\n") == "x\r\ny\r\n"
    for mixed in (b"a\r\nb\n", b"a\nb\n", b"a"):
        assert decode(mixed).fitted("x\ny\r\n") == "x\ny\r\n"


@pytest.mark.parametrize("data", [b"\xff\xfea\0", b"\xfe\xff\0a", b"a\0b"])
def test_binary_files_are_refused(data: bytes) -> None:
    with pytest.raises(EditError, match=r"name is (UTF-16|not a text file)"):
        checked(data, "name")
    assert checked(b"plain", "name").content == "plain"


def test_a_hunk_that_only_adds_is_placed_after_its_anchor_or_at_the_end() -> None:
    assert update("a\nb\n", "@@ a", "+new") == "a\nnew\nb\n"
    assert update("a\nb\n", "@@", "+new") == "a\nb\nnew\n"
    assert update("", "+new") == "new\n"


def test_end_of_file_uses_the_last_match() -> None:
    assert update("a\nb\na\n", "@@", "-a", "+z", "*** End of File") == "a\nb\nz\n"
    with pytest.raises(EditError, match="does not end with its lines"):
        update("a\nb\n", "@@", "-a", "+z", "*** End of File")


def test_trailing_white_space_is_ignored_and_the_files_own_is_kept() -> None:
    assert update("keep  \nold\t\nend\n", "@@", " keep", "-old", "+new", " end ") == "keep  \nnew\nend\n"
    assert update("x\nx \n", "@@", "-x ", "+y") == "x\ny\n"  # an exact match is preferred
    with pytest.raises(EditError):
        update("  x\n", "@@", "-x", "+y")


def test_line_endings_and_a_missing_one_are_unchanged() -> None:
    assert update("a\r\nb\r\n", "@@", " a", "-b", "+c", "+d") == "a\r\nc\r\nd\r\n"
    assert update("a\nb", "@@", "-b", "+c") == "a\nc"


def test_an_empty_line_is_context_without_its_space() -> None:
    assert update("a\n\nb\n", "@@", " a", "", "-b", "+c", "", "") == "a\n\nc\n"


def test_invalid_utf8_is_unchanged_and_never_mixed_with_new_text() -> None:
    text = decode(b"caf\xe9\nold\n")
    [change] = parse(envelope("*** Update File: f", "@@", "-old", "+new"))
    assert isinstance(change, Update)
    assert text.encode(patched(text, change.hunks)) == b"caf\xe9\nnew\n"
    [change] = parse(envelope("*** Update File: f", "@@", "-old", "+né"))
    assert isinstance(change, Update)
    with pytest.raises(EditError, match="not UTF-8"):
        patched(text, change.hunks)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["@@", " a", "-z"], "hunk 1 of 1 does not apply"),
        (["@@", " a", "-z"], "At line 1 its first 1 agree; then the hunk has\nz\nwhere the file has\nb"),
        (["@@", "-a", "+x", "@@", "-q"], "hunk 2 of 2"),
        (["@@", "-b", "+x", "@@", "-a", "+y"], "only before line 3"),
        (["@@ nowhere", "-a"], "is its `@@ nowhere`"),
    ],
)
def test_a_hunk_that_does_not_apply_is_named(lines: list[str], said: str) -> None:
    with pytest.raises(EditError) as caught:
        update("a\nb\nc\n", *lines)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        ("", "must begin with"),
        ("hello", "must begin with"),
        ("*** Begin Patch\n*** Delete File: a", "must end with"),
        (envelope(), "names no file"),
        (envelope("+x"), "Line 2 of the patch belongs to no file"),
        (envelope("*** Add File:"), "Line 2 of the patch names no file"),
        (envelope("*** Add File: a", "x"), "Line 3 of the patch: every line of a new file begins with `+`"),
        (envelope("*** Delete File: a", "-x"), "nothing can follow"),
        (envelope("*** Update File: a", "@@", " x"), "says no change"),
        (envelope("*** Update File: a", "@@", "*x"), "Line 4 of the patch begins with '*'"),
        ("diff --git a/x b/y\nrename from x\nrename to y\n--- a/x\n+++ b/y\n", "use the shell"),
        ("--- a/x\n", "come first"),
        ("--- a/x\n+++ b/x\nnonsense", "Line 3"),
    ],
)
def test_an_invalid_patch_is_refused_with_its_line(patch: str, said: str) -> None:
    with pytest.raises(EditError) as caught:
        parse(patch)
    assert said in str(caught.value)


def test_git_diffs_of_new_and_removed_files_are_read() -> None:
    patch = (
        "diff --git a/new b/new\nnew file mode 100644\n--- /dev/null\n+++ b/new\n@@ -0,0 +1 @@\n+x\n"
        "diff --git a/old b/old\ndeleted file mode 100644\n--- a/old\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
    )
    assert parse(patch) == [Add("new", "x\n"), Delete("old")]


def test_files_that_would_take_quadratic_time_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_match, "_COMPARISONS", 1000)
    with pytest.raises(EditError, match="repeat too often"):
        update("\n" * 1000, "@@", *[" "] * 100, "-x")
    monkeypatch.setattr(patch_match, "_LINES_LIMIT", 10)
    with pytest.raises(EditError, match="more than 10 lines"):
        update("\n" * 11, "@@", "-x")


def test_a_heading_with_an_absurd_number_is_refused() -> None:
    with pytest.raises(EditError, match="a hunk begins with"):
        parse(f"--- a/f\n+++ b/f\n@@ -{'9' * 5000} +1 @@\n-a\n+b\n")
