"""The rows of a SWE-bench data file: the dataset's own columns, and how the instance is rebuilt."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    model_validator,
)
from unidiff.errors import UnidiffParseError
from unidiff.patch import PatchSet

from prorl_envs.env.base import ReferenceCall, Task
from prorl_envs.envs.swebench.logs import PARSERS

START_MARKER = ">>>>> Start Test Output"
END_MARKER = ">>>>> End Test Output"

#: Columns of the dataset that neither the agent nor the grader needs. Hints come from the discussion that led
#: to the fix, so an agent must not see them.
_UNUSED = (
    *("hints_text", "created_at", "environment_setup_commit", "difficulty", "image", "version"),
    "x_dataset",
)


_STRINGS = TypeAdapter(tuple[str, ...])


def _encodable(text: str) -> str:
    if "\0" in text or re.search("[\ud800-\udfff]", text):
        raise ValueError("holds a NUL or a lone surrogate")
    return text


def _patch(text: str) -> str:
    changed_paths(text)
    return _encodable(text)


def _json_list(value: Any) -> Any:
    """The dataset holds lists of tests as JSON text; some of its relatives hold real lists."""
    if not isinstance(value, str):
        return value
    return _STRINGS.validate_json(value)


Text = Annotated[str, Field(min_length=1, max_length=2_000_000), AfterValidator(_encodable)]
Patch = Annotated[str, Field(min_length=1, max_length=2_000_000), AfterValidator(_patch)]
Command = Annotated[str, Field(min_length=1, max_length=10_000), AfterValidator(_encodable)]
#: An exact version and nothing else: a row cannot smuggle in an option, an address or a path.
Pin = Annotated[
    str, Field(max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.!+_]*$")
]
Minor = Annotated[str, Field(pattern=r"^3\.\d{1,2}$")]
TestName = Annotated[str, Field(min_length=1, max_length=10_000)]
Tests = Annotated[tuple[TestName, ...], Field(max_length=100_000), BeforeValidator(_json_list)]


class EnvironmentSpec(BaseModel):
    """How the instance is rebuilt without its image.

    Args:
        pythons: versions on which the reference was seen to resolve and the empty patch not, best first.
        sdist: the source release whose files equal the base commit, as `name==version`.
        pip: every package of the environment, installed with `--no-deps`.
        pre_install: shell commands in the tree, before it is installed and committed.
        install: the shell command that installs the tree; runs without a network.
        release_tag: put on the commit where the package computes its version from git.
        default_route: whether tests need connections to the outside to time out instead of being refused.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    pythons: tuple[Minor, ...] = Field(min_length=1, max_length=20)
    sdist: Pin
    pip: tuple[Pin, ...] = Field(max_length=500)
    pre_install: tuple[Command, ...] = Field(default=(), max_length=50)
    install: Command
    release_tag: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]{0,50}$")
    default_route: bool = False


class SwebenchTask(Task):
    """One instance. Takes a row with the dataset's own column names.

    Args:
        repo: `owner/name` of the repository.
        base_commit: the commit the issue was filed against, as the script names it.
        patch: the reference fix; never shown to the agent.
        test_patch: the tests that came with the fix.
        fail_to_pass: tests that the fix makes pass.
        pass_to_pass: tests that must go on passing.
        eval_script: the official script; runs as it is, but for the commit's name.
        log_parser: name of the official parser of its output.
        environment: how the instance is rebuilt.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_by_name=True, validate_by_alias=True)

    id: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,199}$", validation_alias=AliasChoices("instance_id", "id")
    )
    instruction: Text = Field(validation_alias=AliasChoices("problem_statement", "instruction"))
    repo: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,100}/[A-Za-z0-9_.-]{1,100}$")
    base_commit: str = Field(pattern=r"^[0-9a-f]{40}$")
    patch: Patch
    test_patch: Patch
    fail_to_pass: Tests = Field(min_length=1, validation_alias=AliasChoices("FAIL_TO_PASS", "fail_to_pass"))
    pass_to_pass: Tests = Field(validation_alias=AliasChoices("PASS_TO_PASS", "pass_to_pass"))
    eval_script: Text
    log_parser: str
    eval_type: Literal["pass_and_fail"] = "pass_and_fail"
    environment: EnvironmentSpec = Field(validation_alias=AliasChoices("x_env", "environment"))

    @model_validator(mode="before")
    @classmethod
    def _from_record(cls, row: Any) -> Any:
        if not isinstance(row, Mapping):
            return row
        kept = {name: value for name, value in row.items() if name not in _UNUSED}
        patch = row.get("patch")
        if "reference" not in kept and isinstance(patch, str):
            kept["reference"] = reference_calls(patch)
        return kept

    @model_validator(mode="after")
    def _gradable(self) -> "SwebenchTask":
        if self.log_parser not in PARSERS:
            raise ValueError(
                f"log_parser: no parser {self.log_parser!r}; known: {', '.join(sorted(PARSERS))}"
            )
        for marker in (START_MARKER, END_MARKER):
            if self.eval_script.count(marker) != 1:
                raise ValueError(f"eval_script: {marker!r} must be in it exactly once")
        return self


def reference_calls(patch: str) -> tuple[ReferenceCall, ...]:
    """The tool calls that apply the reference fix and end the episode."""
    delimiter = "END_OF_PATCH"
    while delimiter in patch:
        delimiter += "_"
    body = patch if patch.endswith("\n") else f"{patch}\n"
    command = f"cd /testbed && git apply - <<'{delimiter}'\n{body}{delimiter}\n"
    return (
        ReferenceCall(tool="bash", arguments={"command": command}),
        ReferenceCall(tool="finish", arguments={}),
    )


def changed_paths(patch: str) -> frozenset[str]:
    """Every path, old or new, that a diff touches.

    Raises:
        ValueError: it is no diff, or it names a path outside the tree.
    """
    try:
        files = PatchSet(patch)
    except UnidiffParseError as error:
        raise ValueError(f"not a diff: {error}") from error
    paths = {
        name.removeprefix(prefix)
        for file in files
        for name, prefix in ((file.source_file, "a/"), (file.target_file, "b/"))
        if name not in (None, "/dev/null")
    }
    if not paths:
        raise ValueError("not a diff: it touches no file")
    if outside := [path for path in paths if path.startswith("/") or ".." in path.split("/")]:
        raise ValueError(f"names a path outside the tree: {outside[0]!r}")
    return frozenset(paths)
