"""Task model for all data sets, and model of the recipe to rebuild an instance without its image."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    model_validator,
)

from prorl_envs.env.base import ReferenceCall, Task
from prorl_envs.env.columns import RowModel, decoded
from prorl_envs.env.task_files import encodable
from prorl_envs.envs.swebench.diffs import changed_paths
from prorl_envs.envs.swebench.foreign import missing
from prorl_envs.envs.swebench.schemas import END_MARKER, START_MARKER, normalised
from prorl_envs.envs.swebench.verdict import Status

#: Directory in which a grader finds the files hidden from the agent.
HIDDEN = "/opt/hidden"

_STRINGS = TypeAdapter(tuple[str, ...])


def _patch(text: str) -> str:
    if text:
        changed_paths(text)
    return encodable(text)


def _in_tree(path: str) -> str:
    if path.startswith("/") or not path or ".." in path.split("/"):
        raise ValueError(f"names a path outside the tree: {path!r}")
    return encodable(path)


def _json_list(value: Any) -> Any:
    """Parse a list of tests, which SWE-bench stores as JSON text; other data sets have real lists."""
    if not isinstance(value, str):
        return value
    return _STRINGS.validate_json(value)


Text = Annotated[str, Field(min_length=1, max_length=2_000_000), AfterValidator(encodable)]
Patch = Annotated[str, Field(max_length=2_000_000), AfterValidator(_patch)]
InTree = Annotated[str, Field(max_length=4096), AfterValidator(_in_tree)]
Absolute = Annotated[str, Field(max_length=4096, pattern=r"^(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)+$")]
Command = Annotated[str, Field(min_length=1, max_length=10_000), AfterValidator(encodable)]
#: Name and exact version of a package. A row must not pass pip an option, an address or a path.
Pin = Annotated[
    str, Field(max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9.!+_]*$")
]
Minor = Annotated[str, Field(pattern=r"^3\.\d{1,2}$")]
TestName = Annotated[str, Field(min_length=1, max_length=10_000)]
Tests = Annotated[tuple[TestName, ...], Field(max_length=100_000), BeforeValidator(_json_list)]


class EnvironmentSpec(RowModel):
    """Recipe to rebuild an instance without its image.

    Args:
        pythons: minor versions of Python, best first. On each, the reference was verified to resolve, and the
            untouched tree not to.
        sdist: source release with the files of the base commit, as `name==version`.
        pip: all packages of the environment; installed with `--no-deps`.
        pre_install: shell commands that run in the tree before it is committed and installed.
        install: shell command that installs the tree; runs without a network.
        revert: whether the release contains the fix, so that the fix and its tests are reverted.
        release_tag: tag for the commit, if the package computes its version from git.
        default_route: whether tests need connections to other hosts to time out, instead of being refused.
    """

    pythons: tuple[Minor, ...] = Field(min_length=1, max_length=20)
    sdist: Pin
    pip: tuple[Pin, ...] = Field(max_length=500)
    pre_install: tuple[Command, ...] = Field(default=(), max_length=50)
    install: Command
    revert: bool = False
    release_tag: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]{0,50}$")
    default_route: bool = False


class SwebenchTask(Task):
    """One instance of any data set. Accepts a row with the columns of its data set.

    Args:
        dataset: name of the row's schema.
        repo: `owner/name` of the repository.
        base_commit: name of the base commit in the script; empty if the script does not name it.
        patch: the reference fix, which the agent never sees; empty if the row has none.
        bug: whether `patch` is a bug, which is applied to the image's tree; the fix is its reverse.
        test_patch: the tests that came with the fix; empty if the image contains them.
        fail_to_pass: tests that the fix makes pass.
        pass_to_pass: tests that must still pass.
        expected: instead of the two lists, the required status of every test, also of failing tests.
        eval_script: the official test script; only the commit's name is replaced.
        log_parser: name of the official parser of the script's output.
        eval_type: with `fail_only`, a test that the log does not name counts as passed.
        image: Docker name of the container image.
        testbed: path of the tree in the image.
        test_paths: additional files of the tree that the agent must not change.
        hidden_files: files of the tree that are hidden from the agent; in grading they are in /opt/hidden.
        hidden_paths: absolute paths of the image that are hidden from the agent.
        environment: recipe to rebuild the instance without an image; may be JSON text.
    """

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

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
        fields = normalised(row)
        instance = fields.get("instance_id", fields.get("id"))
        if not ("x_env" in fields or "environment" in fields) and (known := recipe(instance)):
            fields["x_env"] = known
        if "reference" not in fields and isinstance(patch := fields.get("patch"), str) and patch:
            testbed, bug = fields.get("testbed", "/testbed"), bool(fields.get("bug"))
            fields["reference"] = reference_calls(patch, testbed, reverse=bug)
        return fields

    @model_validator(mode="after")
    def _gradable(self) -> "SwebenchTask":
        if not self.fail_to_pass and not self.expected:
            raise ValueError("FAIL_TO_PASS: names no test")
        if problem := missing(self.log_parser):
            raise ValueError(f"log_parser: {problem}")
        for marker in (START_MARKER, END_MARKER):
            if self.eval_script.count(marker) != 1:
                raise ValueError(f"eval_script: must contain {marker!r} exactly once")
        if self.environment is None and not self.image:
            raise ValueError("image: the row has neither an image nor a recipe to build the instance (x_env)")
        return self

    @property
    def own_files(self) -> frozenset[str]:
        """The tests' own files, which the agent must not change."""
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


def recipe(instance: object) -> Mapping[str, Any] | None:
    """Return the value of the column `x_env` for a known instance, or None.

    Rows without the column get it, so that these instances run without images from an unmodified data file.
    """
    return _recipes().get(instance) if isinstance(instance, str) else None


@cache
def _recipes() -> Mapping[str, Mapping[str, Any]]:
    found: Mapping[str, Mapping[str, Any]] = json.loads(
        (Path(__file__).parent / "data/recipes.json").read_bytes()
    )
    return found
