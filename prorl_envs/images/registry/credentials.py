"""Credentials for registries, from Docker's or Podman's file, or from Apptainer's variables."""

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from prorl_envs.errors import InputError
from prorl_envs.images.registry.reference import DOCKER_HUB

_FILE_LIMIT = 1 << 20
_DOCKER_HUB_KEYS = ("https://index.docker.io/v1/", "https://index.docker.io/v1", "index.docker.io")


@dataclass(frozen=True, slots=True)
class RegistryLogin:
    """User name and password, or a token of the registry that replaces them.

    Args:
        identity_token: refresh token of OAuth 2; "" if there is none.
    """

    user: str
    password: str = field(repr=False)
    identity_token: str = field(default="", repr=False)


def find_login(registry: str, repository: str, environ: Mapping[str, str]) -> RegistryLogin | None:
    """Return the login for a repository, or None to pull without one.

    Reads `$APPTAINER_DOCKER_USERNAME` and `_PASSWORD`, then `$REGISTRY_AUTH_FILE`, Podman's file in
    `$XDG_RUNTIME_DIR`, and Docker's (`$DOCKER_CONFIG`, else `~/.docker/config.json`). The longest matching
    path of a repository has precedence, as in containers-auth.json(5).

    Raises:
        InputError: a file that a variable names cannot be read.
    """
    for program in ("APPTAINER", "SINGULARITY"):
        user, password = (environ.get(f"{program}_DOCKER_{name}") for name in ("USERNAME", "PASSWORD"))
        if user and password:
            return RegistryLogin(user, password)
    for path in _files(environ):
        logins = _read(path, required=str(path) == environ.get("REGISTRY_AUTH_FILE"))
        for key in _keys(registry, repository):
            if (login := _login(logins.get(key))) is not None:
                return login
    return None


def _files(environ: Mapping[str, str]) -> list[Path]:
    if named := environ.get("REGISTRY_AUTH_FILE"):
        return [Path(named)]
    home = Path(environ.get("HOME") or "/nonexistent")
    folders = [Path(environ.get("DOCKER_CONFIG") or home / ".docker")]
    runtime = environ.get("XDG_RUNTIME_DIR")
    podman = [Path(runtime) / "containers" / "auth.json"] if runtime else []
    return podman + [folder / "config.json" for folder in folders]


def _read(path: Path, *, required: bool) -> Mapping[str, object]:
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_FILE_LIMIT))
        logins = found["auths"] if isinstance(found, dict) and "auths" in found else {}
    except (OSError, ValueError, RecursionError) as error:
        if not required and isinstance(error, OSError):
            return {}
        raise InputError(
            f"cannot read the registry logins in {path}", hint="write the file again with docker login"
        ) from error
    return logins if isinstance(logins, dict) else {}


def _keys(registry: str, repository: str) -> list[str]:
    parts = repository.split("/")
    paths = ["/".join([registry, *parts[:count]]) for count in range(len(parts), -1, -1)]
    urls = [
        f"{scheme}://{registry}{end}" for scheme in ("https", "http") for end in ("", "/", "/v1/", "/v2/")
    ]
    return paths + urls + list(_DOCKER_HUB_KEYS if registry == DOCKER_HUB else ())


def _login(entry: object) -> RegistryLogin | None:
    if not isinstance(entry, dict):
        return None
    user, password = entry.get("username"), entry.get("password")
    if isinstance(encoded := entry.get("auth"), str) and encoded:
        try:
            user, _, password = base64.b64decode(encoded, validate=True).decode().partition(":")
        except (binascii.Error, ValueError):
            return None
    token = entry.get("identitytoken")
    if isinstance(user, str) and (password or token):
        return RegistryLogin(user, str(password or ""), str(token or ""))
    return None
