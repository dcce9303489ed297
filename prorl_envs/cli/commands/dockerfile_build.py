"""`prorl-envs image build` for a Dockerfile."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prorl_envs.app.compose import dockerfile_builder
from prorl_envs.app.run_loop import run
from prorl_envs.cli.options import settings_of
from prorl_envs.cli.output.console import err, out, plain
from prorl_envs.errors import InputError
from prorl_envs.images.dockerfile.build import BuildProgress

_TEXT_LIMIT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """Options of a build.

    Args:
        file: the Dockerfile; None means the file `Dockerfile` of the context.
        tag: name of the image in the store; "" means a name derived from its content.
        target: stage to build; None means the last stage.
        args: values for ARG instructions.
        secrets: files of secrets by id.
        bases: local images by reference.
        allow: hosts that the build can reach.
    """

    file: Path | None = None
    tag: str = ""
    target: str | None = None
    args: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, Path] = field(default_factory=dict)
    bases: Mapping[str, Path] = field(default_factory=dict)
    allow: Sequence[str] = ()


def build_dockerfile(config: Path | None, context: Path, options: BuildOptions) -> None:
    """Build a Dockerfile and print the path of its image.

    Raises:
        InputError: the Dockerfile or an option is wrong.
        SandboxError: the build failed.
    """
    for secret, path in options.secrets.items():
        if not path.is_file():
            raise InputError(f"--secret {secret}: there is no file {path}")
    out.print(str(run(_build(config, context, options))), soft_wrap=True)


async def _build(config: Path | None, context: Path, options: BuildOptions) -> Path:
    settings = settings_of(config)
    async with dockerfile_builder(settings, bases=options.bases, allow=options.allow) as builder:
        return await builder.build(
            context,
            options.file,
            target=options.target,
            args=options.args,
            secrets=options.secrets,
            name=options.tag.replace("/", "-").replace(":", "-"),
            on_progress=_print,
        )


def _print(event: BuildProgress) -> None:
    match event.kind:
        case "step":
            text = " ".join(event.text.split())
            short = text if len(text) <= _TEXT_LIMIT else f"{text[:_TEXT_LIMIT]}..."
            err.print(plain(f"[{event.step}/{event.steps}] {short}"))
        case "shared":
            err.print("  in the store already")
        case "made":
            err.print(f"  made in {event.seconds:.1f} s")
        case "output":
            for line in event.text.rstrip().splitlines():
                err.print(plain(f"  | {line}"))
        case "note":
            err.print(plain(f"  {event.text}"))
