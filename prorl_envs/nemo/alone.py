"""Standalone NeMo Gym resources server on an inherited socket, run by the Python of a NeMo Gym installation.

    python -P alone.py SOCKET_FD < request.json

The request names the server's YAML file and the changes to it. NeMo Gym's own `gym env start` also starts
agents, models and Ray (20 s) and chooses ports; a rollout service needs none of that. A server that uses Ray
starts it at its first use.

Imports nothing of this package, because it may not be installed there.
"""

# mypy: disable-error-code="import-not-found,import-untyped"
# NeMo Gym is an optional extra and ships no types.

import ctypes
import json
import os
import runpy
import signal
import socket
import sys
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
#: Exit status that distinguishes a refusal from a crash.
_REFUSED = 2
_SHUTDOWN_S = 5


def refuse(message: str, hint: str) -> None:
    """Print the reason on a separate line, and exit."""
    sys.stdout.write(json.dumps({"error": message, "hint": hint}) + "\n")
    sys.stdout.flush()
    sys.exit(_REFUSED)


def find(name: str, roots: list[Path]) -> Path:
    """Find a file by its path, or by its path below one of the roots, as NeMo Gym does."""
    for place in (Path(name), *(root / name for root in roots)):
        if place.is_file():
            return place.resolve()
    refuse(
        f"nemo.config: there is no file {name}", "give a path, or resources_servers/NAME/configs/NAME.yaml"
    )
    raise AssertionError


def servers_of(config: dict[str, Any]) -> dict[str, str]:
    """Return the folder of each resources server in a YAML file, by the name of the instance."""
    found = {}
    for instance, block in config.items():
        servers = block.get("resources_servers") if isinstance(block, dict) else None
        if isinstance(servers, dict) and len(servers) == 1:
            found[instance] = next(iter(servers))
    return found


def choose(config: dict[str, Any], wanted: str | None, path: Path) -> tuple[str, str]:
    """Return the instance to serve, and its folder."""
    found = servers_of(config)
    if not found:
        refuse(
            f"{path} names no resources server", "INSTANCE: {resources_servers: {FOLDER: {entrypoint: ...}}}"
        )
    if wanted is None and len(found) > 1:
        refuse(f"{path} names {len(found)} resources servers", f"nemo.instance: one of {', '.join(found)}")
    instance = wanted or next(iter(found))
    if instance not in found:
        refuse(f"{path} has no resources server {instance!r}", f"known: {', '.join(found)}")
    return instance, found[instance]


def check_references(block: dict[str, Any], path: Path) -> None:
    """Refuse a server that refers to other servers, such as a judge's model: they do not run here."""
    for key, value in block.items():
        if isinstance(value, dict) and str(value.get("type", "")).startswith("responses_api_"):
            refuse(
                f"{path}: {key} refers to {value.get('name')!r}, which does not run here",
                "start it with `gym env start`, and give its address: nemo.url",
            )


def prepare(request: dict[str, Any], roots: list[Path], port: int) -> Path:
    """Pass the configuration to NeMo Gym, and return the path of the server's program."""
    from omegaconf import OmegaConf

    path = find(request["config"], roots)
    config = OmegaConf.to_container(OmegaConf.load(path))
    if not isinstance(config, dict):
        refuse(f"{path} is not a mapping", "a NeMo Gym configuration is expected")
    instance, folder = choose(config, request["instance"], path)
    block = config[instance]["resources_servers"][folder]
    known = set(block)
    block.update(request["overrides"])
    check_references(block, path)
    block.update({"host": "127.0.0.1", "port": port, "num_workers": 1})
    config.setdefault("head_server", {"host": "127.0.0.1", "port": 0})
    config.update({"dry_run": False})
    os.environ["NEMO_GYM_CONFIG_DICT"] = OmegaConf.to_yaml(OmegaConf.create(config))
    os.environ["NEMO_GYM_CONFIG_PATH"] = instance
    for root in (*path.parents, *roots):
        program = Path(root, "resources_servers", folder, block.get("entrypoint", "app.py"))
        if program.is_file():
            return program
    refuse(
        f"{path}: there is no folder resources_servers/{folder}", f"its block has {', '.join(sorted(known))}"
    )
    raise AssertionError


def serve_on(listener: socket.socket) -> None:
    """Make NeMo Gym serve on `listener`, without Ray."""
    import uvicorn
    from nemo_gym import server_utils

    def run(app: Any, **_: Any) -> None:
        config = uvicorn.Config(
            app, timeout_graceful_shutdown=_SHUTDOWN_S, timeout_keep_alive=30, access_log=False
        )
        uvicorn.Server(config).run(sockets=[listener])

    uvicorn.run = run
    server_utils.initialize_ray = lambda *_, **__: None


def main() -> None:
    # Kill this process when the service exits; the kernel ensures it for every kind of exit.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    request = json.load(sys.stdin)
    if os.getppid() != request["parent"]:
        sys.exit(1)
    listener = socket.socket(fileno=int(sys.argv[1]))
    try:
        import nemo_gym
    except ImportError as error:
        refuse(
            f"{sys.executable} has no NeMo Gym: {error}",
            "nemo.python: the Python of an environment that has it",
        )
    roots = [Path(root) for root in request["roots"]] + [Path(nemo_gym.__file__).parent.parent]
    program = prepare(request, roots, listener.getsockname()[1])
    serve_on(listener)
    sys.path[:0] = [str(program.parent), str(program.parents[2])]
    sys.argv = [str(program)]
    os.chdir(program.parent)
    runpy.run_path(str(program), run_name="__main__")


if __name__ == "__main__":
    main()
