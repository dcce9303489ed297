"""Task model of all data sets, and the recipe for rebuilding an instance without its image."""

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

from prorl_envs.env.base import ReferenceCall, Task
from prorl_envs.env.columns import decoded
from prorl_envs.envs.swebench.diffs import changed_paths
from prorl_envs.envs.swebench.foreign import missing
from prorl_envs.envs.swebench.logs import Status
from prorl_envs.envs.swebench.recipes import recipe
from prorl_envs.envs.swebench.schemas import END_MARKER, START_MARKER, normalised

#: Directory in which a grader finds the files hidden from the agent.
HIDDEN = "/opt/hidden"

_STRINGS = TypeAdapter(tuple[str, ...])


def _encodable(text: str) -> str:
    if "\0" in text or re.search("[\ud800-\udfff]", text):
        raise ValueError("holds a NUL or a lone surrogate")
    return text


def _patch(text: str) -> str:
    if text:
        changed_paths(text)
    return _encodable(text)


def _in_tree(path: str) -> str:
    if path.startswith("/") or not path or ".." in path.split("/"):
        raise ValueError(f"names a path outside the tree: {path!r}")
    return _encodable(path)


def _json_list(value: Any) -> Any:
    """Parse lists of tests, which the data set holds as JSON text; some of its relatives hold real lists."""
    if not isinstance(value, str):
        return value
    return _STRINGS.validate_json(value)


Text = Annotated[str, Field(min_length=1, max_length=2_000_000), AfterValidator(_encodable)]
Patch = Annotated[str, Field(max_length=2_000_000), AfterValidator(_patch)]
InTree = Annotated[str, Field(max_length=4096), AfterValidator(_in_tree)]
Absolute = Annotated[str, Field(max_length=4096, pattern=r"^(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)+$")]
Command = Annotated[str, Field(min_length=1, max_length=10_000), AfterValidator(_encodable)]
#: An exact version and nothing else: a row cannot smuggle in an option, an address or a path.
Pin = Annotated[
    str, Field(max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.!+_]*$")
]
Minor = Annotated[str, Field(pattern=r"^3\.\d{1,2}$")]
TestName = Annotated[str, Field(min_length=1, max_length=10_000)]
Tests = Annotated[tuple[TestName, ...], Field(max_length=100_000), BeforeValidator(_json_list)]


class EnvironmentSpec(BaseModel):
    """Recipe for rebuilding the instance without its image.

    Args:
        pythons: versions on which the reference was verified to resolve and the empty patch not, best first.
        sdist: the source release whose files equal the base commit, as `name==version`.
        pip: every package of the environment, installed with `--no-deps`.
        pre_install: shell commands in the tree, before it is installed and committed.
        install: the shell command that installs the tree; runs without a network.
        revert: the release holds the fix already: it is reverted, with its tests.
        release_tag: tag of the commit, if the package computes its version from git.
        default_route: true if tests need connections to the outside to time out instead of being refused.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    pythons: tuple[Minor, ...] = Field(min_length=1, max_length=20)
    sdist: Pin
    pip: tuple[Pin, ...] = Field(max_length=500)
    pre_install: tuple[Command, ...] = Field(default=(), max_length=50)
    install: Command
    revert: bool = False
    release_tag: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]{0,50}$")
    default_route: bool = False


class SwebenchTask(Task):
    """One instance, of any data set. Accepts a row with that data set's own columns.

    Args:
        dataset: the row's original schema.
        repo: `owner/name` of the repository.
        base_commit: the commit the issue was filed against, as the script names it; empty if none is named.
        patch: the reference fix; never shown to the agent. Empty if the row has none.
        bug: `patch` is a bug that is applied to the image's tree: the fix is its reverse.
        test_patch: the tests that came with the fix; empty if the image has them.
        fail_to_pass: tests that the fix makes pass.
        pass_to_pass: tests that must still pass.
        expected: alternatively, the required status of every test, including failures.
        eval_script: the official script; runs unchanged, except for the commit's name.
        log_parser: name of the official parser of its output.
        eval_type: determines whether a test that the log does not name counts as passed.
        image: Docker name of the container image.
        testbed: path of the tree in the image.
        test_paths: further files of the tree that the agent must not change.
        hidden_files: files of the tree that are hidden from the agent; a grader finds them in /opt/hidden.
        hidden_paths: absolute paths of the image that the agent does not see.
        environment: recipe for rebuilding the instance without an image; in a Parquet file perhaps as JSON
            text.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_by_name=True, validate_by_alias=True)

    dataset: str = Field(max_length=50)
    id: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,199}$", validation_alias=AliasChoices("instance_id", "id")
    )
    instruction: Text = Field(validation_alias=AliasChoices("problem_statement", "instruction"))
    repo: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,100}/[A-Za-z0-9_.-]{1,100}$")
    base_commit: str = Field(pattern=r"^([0-9a-f]{40})?$")
    patch: Patch
    bug: bool = False
    test_patch: Patch
    fail_to_pass: Tests = Field(validation_alias=AliasChoices("FAIL_TO_PASS", "fail_to_pass"))
    pass_to_pass: Tests = Field(validation_alias=AliasChoices("PASS_TO_PASS", "pass_to_pass"))
    expected: dict[TestName, Status] = Field(default={}, max_length=100_000)
    eval_script: Text
    log_parser: str = Field(min_length=1, max_length=300)
    eval_type: Literal["pass_and_fail", "fail_only"] = "pass_and_fail"
    image: str = Field(default="", max_length=512, pattern=r"^[A-Za-z0-9._:/@-]*$")
    testbed: str = Field(default="/testbed", pattern=r"^(/[A-Za-z0-9_.-]*[A-Za-z0-9_-][A-Za-z0-9_.-]*)+$")
    test_paths: tuple[InTree, ...] = Field(default=(), max_length=100_000)
    hidden_files: tuple[InTree, ...] = Field(default=(), max_length=100)
    hidden_paths: tuple[Absolute, ...] = Field(default=(), max_length=100)
    environment: Annotated[EnvironmentSpec | None, BeforeValidator(decoded)] = Field(
        default=None, validation_alias=AliasChoices("x_env", "environment")
    )

    @model_validator(mode="before")
    @classmethod
    def _from_record(cls, row: Any) -> Any:
        if not isinstance(row, Mapping):
            return row
        kept = normalised(row)
        named = kept.get("instance_id", kept.get("id"))
        if not ("x_env" in kept or "environment" in kept) and (known := recipe(named)):
            kept["x_env"] = known
        if "reference" not in kept and isinstance(patch := kept.get("patch"), str) and patch:
            testbed, bug = kept.get("testbed", "/testbed"), bool(kept.get("bug"))
            kept["reference"] = reference_calls(patch, testbed, reverse=bug)
        return kept

    @model_validator(mode="after")
    def _gradable(self) -> "SwebenchTask":
        if not self.fail_to_pass and not self.expected:
            raise ValueError("FAIL_TO_PASS: names no test")
        if lacking := missing(self.log_parser):
            raise ValueError(f"log_parser: {lacking}")
        for marker in (START_MARKER, END_MARKER):
            if self.eval_script.count(marker) != 1:
                raise ValueError(f"eval_script: {marker!r} must be in it exactly once")
        if self.environment is None and not self.image:
            raise ValueError("image: the row names none, and how to build the instance is not known (x_env)")
        return self

    @property
    def own_files(self) -> frozenset[str]:
        """The files that the tests bring, which the agent must not change."""
        tested = changed_paths(self.test_patch) if self.test_patch else frozenset()
        return tested | set(self.test_paths) | set(self.hidden_files)


def reference_calls(
    patch: str, testbed: str = "/testbed", *, reverse: bool = False
) -> tuple[ReferenceCall, ...]:
    """Return the tool calls that apply the reference fix, or revert a bug, and finish the episode."""
    delimiter = "END_OF_PATCH"
    while delimiter in patch:
        delimiter += "_"
    body = patch if patch.endswith("\n") else f"{patch}\n"
    apply = "git apply --reverse" if reverse else "git apply"
    command = f"cd {testbed} && {apply} - <<'{delimiter}'\n{body}{delimiter}\n"
    return (
        ReferenceCall(tool="bash", arguments={"command": command}),
        ReferenceCall(tool="finish", arguments={}),
    )
