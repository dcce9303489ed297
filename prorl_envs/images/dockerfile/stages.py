"""Plan of a build: the stages of a Dockerfile that a target needs, in order."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from prorl_envs.errors import name_hint
from prorl_envs.images.dockerfile.expand import ExpansionError, expand, split_words
from prorl_envs.images.dockerfile.mounts import mount_options
from prorl_envs.images.dockerfile.parser import Dockerfile, DockerfileError, Instruction

_FROM = re.compile(r"(\S+)(?:\s+[aA][sS]\s+(\S+))?")
_STAGE = re.compile(r"[a-z][a-z0-9_.-]*")
_DECLARATION = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?:=(.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """Stage of a build.

    Args:
        index: number in the Dockerfile, from 0.
        name: name in lower case; "" if it has none.
        base: reference of its base image, or name of an earlier stage.
        parent: index of the stage that `base` names; None if `base` is an image.
        platform: platform such as `linux/amd64`; "" is this machine's.
        origin: its FROM instruction.
        steps: the instructions after FROM.
    """

    index: int
    name: str
    base: str
    parent: int | None
    platform: str
    origin: Instruction
    steps: tuple[Instruction, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPlan:
    """Stages that a target needs.

    Args:
        dockerfile: the Dockerfile.
        stages: the stages in order; the last one is the target.
        names: index of each named stage of the Dockerfile.
        global_args: values of the ARG instructions before the first FROM.
    """

    dockerfile: Dockerfile
    stages: tuple[StagePlan, ...]
    names: Mapping[str, int]
    global_args: Mapping[str, str]


def platform_args(platform: str) -> dict[str, str]:
    """Return the predefined arguments of a platform such as `linux/amd64`."""
    system, _, rest = platform.partition("/")
    architecture, _, variant = rest.partition("/")
    values = {"PLATFORM": platform, "OS": system, "ARCH": architecture, "VARIANT": variant}
    return {f"{side}{name}": value for side in ("TARGET", "BUILD") for name, value in values.items()}


def plan_build(
    dockerfile: Dockerfile, args: Mapping[str, str], *, platform: str, target: str | None = None
) -> BuildPlan:
    """Plan the build of a target.

    Args:
        args: values for ARG instructions.
        platform: platform of this machine.
        target: name or number of a stage; None is the last stage.

    Raises:
        DockerfileError: an instruction is invalid, or the stage does not exist.
    """
    global_args: dict[str, str] = {}
    known = platform_args(platform)
    known |= {name: args[name] for name in known.keys() & args.keys()}
    stages: list[StagePlan] = []
    names: dict[str, int] = {}
    for instruction in dockerfile.instructions:
        if instruction.name == "FROM":
            stage = _stage(dockerfile, instruction, {**known, **global_args}, names, len(stages))
            stages.append(stage)
            if stage.name:
                names[stage.name] = stage.index
        elif stages:
            stages[-1] = replace(stages[-1], steps=(*stages[-1].steps, instruction))
        elif instruction.name == "ARG":
            global_args |= declared_args(dockerfile, instruction, {**known, **global_args}, args, {})
        else:
            raise dockerfile.error(instruction, "is before the first FROM")
    chosen = _target(dockerfile, target, names, len(stages))
    needed = _needed(dockerfile, stages, names, chosen)
    return BuildPlan(
        dockerfile=dockerfile,
        stages=tuple(stage for stage in stages if stage.index in needed),
        names=names,
        global_args=global_args,
    )


def declared_args(
    dockerfile: Dockerfile,
    instruction: Instruction,
    known: Mapping[str, str],
    given: Mapping[str, str],
    inherited: Mapping[str, str],
) -> dict[str, str]:
    """Return the values that an ARG instruction sets.

    Args:
        known: variables for the default values.
        given: values from the caller of the build.
        inherited: values of arguments without a default.

    Raises:
        DockerfileError: a word is not a declaration.
    """
    found: dict[str, str] = {}
    for word in split_words(instruction.text, escape=dockerfile.escape):
        declared = _DECLARATION.fullmatch(word)
        if declared is None:
            raise dockerfile.error(instruction, f"{word} declares no argument", "write NAME or NAME=default")
        name, default = declared[1], declared[2]
        if name in given:
            found[name] = given[name]
        elif default is not None:
            try:
                found[name] = expand(default, {**known, **found}, escape=dockerfile.escape)
            except ExpansionError as error:
                raise dockerfile.error(instruction, error.message) from error
        elif name in inherited:
            found[name] = inherited[name]
    return found


def declared_names(dockerfile: Dockerfile) -> set[str]:
    """Return the names that the ARG instructions of a Dockerfile declare."""
    declared = [step.text for step in dockerfile.instructions if step.name == "ARG"]
    words = [word for text in declared for word in split_words(text, escape=dockerfile.escape)]
    return {word.partition("=")[0] for word in words}


def _stage(
    dockerfile: Dockerfile,
    instruction: Instruction,
    variables: Mapping[str, str],
    names: Mapping[str, int],
    index: int,
) -> StagePlan:
    found = _FROM.fullmatch(instruction.text)
    if found is None:
        raise dockerfile.error(instruction, "needs an image", "write FROM image, or FROM image AS name")
    name = (found[2] or "").lower()
    if name and not _STAGE.fullmatch(name):
        raise dockerfile.error(instruction, f"{name} cannot be the name of a stage")
    if name in names:
        raise dockerfile.error(instruction, f"another stage is called {name}")
    try:
        base = expand(found[1], variables, escape=dockerfile.escape)
        platform = expand(instruction.flag("platform"), variables, escape=dockerfile.escape)
    except ExpansionError as error:
        raise dockerfile.error(instruction, error.message) from error
    if not base:
        raise dockerfile.error(instruction, f"{found[1]} is empty", "give the argument with --build-arg")
    return StagePlan(
        index=index,
        name=name,
        base=base,
        parent=names.get(base.lower()),
        platform=platform,
        origin=instruction,
        steps=(),
    )


def stage_index(name: str, names: Mapping[str, int], before: int) -> int | None:
    """Return the index of the earlier stage with a name or number; None if there is none.

    Args:
        names: index of each named stage.
        before: index of the first later stage.
    """
    index = int(name) if name.isdecimal() else names.get(name.lower())
    return index if index is not None and index < before else None


def _target(dockerfile: Dockerfile, target: str | None, names: Mapping[str, int], count: int) -> int:
    if target is None:
        return count - 1
    index = stage_index(target, names, count)
    if index is None:
        hint = name_hint(target, names)
        raise DockerfileError(f"has no stage {target}", file=dockerfile.file, hint=hint)
    return index


def _needed(
    dockerfile: Dockerfile, stages: list[StagePlan], names: Mapping[str, int], target: int
) -> set[int]:
    needed: set[int] = set()
    pending = [target]
    while pending:
        stage = stages[pending.pop()]
        if stage.index in needed:
            continue
        needed.add(stage.index)
        for name in _sources(dockerfile, stage):
            index = stage_index(name, names, stage.index)
            if index is not None:
                pending.append(index)
        if stage.parent is not None:
            pending.append(stage.parent)
    return needed


def _sources(dockerfile: Dockerfile, stage: StagePlan) -> Iterator[str]:
    for step in stage.steps:
        if step.name == "COPY" and step.flag("from"):
            yield step.flag("from")
        elif step.name == "RUN":
            yield from (options["from"] for options in mount_options(dockerfile, step) if "from" in options)
