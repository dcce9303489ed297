"""`prorl-envs image build` for a Dockerfile."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from prorl_envs.app.compose import dockerfile_builder
from prorl_envs.cli.output.console import err, plain
from prorl_envs.config import Settings
from prorl_envs.errors import InputError
from prorl_envs.images.dockerfile.build import BuildProgress

_TEXT_LIMIT = 100


async def build_dockerfile(
    settings: Settings,
    context: Path,
    *,
    file: Path | None,
    tag: str,
    target: str | None,
    args: Mapping[str, str],
    secrets: Mapping[str, Path],
    bases: Mapping[str, Path],
    allow: Sequence[str],
) -> Path:
    """Build a Dockerfile, and return the path of its image.

    Args:
        settings: all settings.
        context: directory of the files that the Dockerfile copies.
        file: the Dockerfile; None means the file `Dockerfile` of the context.
        tag: name of the image in the store; "" means a name derived from its content.
        target: stage to build; None means the last stage.
        args: values for ARG instructions.
        secrets: files of secrets by id.
        bases: local images by reference.
        allow: hosts that the build can reach.

    Raises:
        InputError: the Dockerfile or an option is wrong.
        SandboxError: the build failed.
    """
    for secret, path in secrets.items():
        if not path.is_file():
            raise InputError(f"--secret {secret}: there is no file {path}")
    name = tag.replace("/", "-").replace(":", "-")
    async with dockerfile_builder(settings, bases=bases, allow=allow) as builder:
        return await builder.build(
            context, file, target=target, args=args, secrets=secrets, name=name, on_progress=_print
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
