"""Options of `RUN --mount`."""

import csv

from prorl_envs.images.dockerfile.parser import Dockerfile, Instruction

_TYPES = ("bind", "cache", "secret", "tmpfs")
_ALIASES = {"src": "source", "dst": "target", "destination": "target", "ro": "readonly", "rw": "readwrite"}
_OPTIONS = (
    *("type", "source", "target", "from", "id", "readonly", "readwrite", "sharing", "required", "env"),
    *("mode", "uid", "gid", "size"),
)


def mount_options(dockerfile: Dockerfile, instruction: Instruction) -> list[dict[str, str]]:
    """Return the options of each mount of a RUN by their long names, always with `type`.

    Raises:
        DockerfileError: an option is unknown, or a type is not supported.
    """
    return [_options(dockerfile, instruction, value) for name, value in instruction.flags if name == "mount"]


def _options(dockerfile: Dockerfile, instruction: Instruction, text: str) -> dict[str, str]:
    found = {"type": "bind"}
    for part in next(csv.reader([text]), []):
        key, equals, value = part.partition("=")
        key = _ALIASES.get(key.lower(), key.lower())
        if key not in _OPTIONS:
            raise dockerfile.error(instruction, f"--mount has no option {key}")
        found[key] = value if equals else "true"
    if found["type"] not in _TYPES:
        raise dockerfile.error(
            instruction, f"--mount=type={found['type']} is not supported", f"supported: {', '.join(_TYPES)}"
        )
    if found["type"] == "secret":
        found.setdefault("id", found.get("target", "").rpartition("/")[2])
        if "env" not in found:
            found.setdefault("target", f"/run/secrets/{found['id']}")
    elif not found.get("target"):
        raise dockerfile.error(instruction, "--mount needs a target")
    return found
