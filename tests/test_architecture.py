"""The rooms of the house and who may import whom. A new edge needs a reason, and a line here."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "prorl_envs"

#: For each room, what of this package its modules may import: a room, or one module of it.
MAY_IMPORT: dict[str, frozenset[str]] = {
    "__init__": frozenset(),
    "errors": frozenset(),
    "clock": frozenset(),
    "window": frozenset(),
    "config": frozenset({"errors"}),
    "sandbox": frozenset({"errors"}),
    # A tool server in its sandbox's own pid namespace asks the first process to end the others.
    "tools": frozenset({"errors", "window", "sandbox.base", "sandbox.descriptors", "sandbox.inside"}),
    "images": frozenset({"errors", "clock", "sandbox.sif", "sandbox.files", "sandbox.syscalls"}),
    "conformance": frozenset({"errors", "sandbox", "tools"}),
    # A task may name an image that has to be pulled or built first.
    "env": frozenset({"errors", "sandbox", "images", "tools"}),
    "envs": frozenset({"errors", "sandbox", "images", "tools", "env"}),
    "remote": frozenset({"errors", "clock", "tools.types", "env"}),  # NeMo Gym's servers, by HTTP alone
    "catalog": frozenset({"errors", "config", "sandbox.base", "env", "remote"}),
    "apps": frozenset({"nemo"}),  # a family's NeMo Gym server
    "gym": frozenset({"errors", "sandbox", "tools", "env", "config", "catalog"}),
    "nemo": frozenset(
        # Its agent is a client of the rollout service.
        {"errors", "sandbox", "images", "tools", "env", "config", "policy.types"}
        | {f"rollout.{module}" for module in ("checks", "client", "errors", "inbox", "types")}
    ),
    # Clients of the rollout service that speak a trainer's language; each imports its own trainer, and late.
    "trainers": frozenset(
        {"errors", "policy.types"}
        | {
            f"rollout.{module}"
            for module in (
                "batch_types",
                "checks",
                "client",
                "episode_types",
                "errors",
                "inbox",
                "sync_client",
                "types",
                "views",
            )
        }
    ),
    "policy": frozenset({"errors", "clock", "window", "tools.types"}),
    "viewer": frozenset({"errors"}),
    # A service serves the pages that show it.
    "rollout": frozenset(
        {
            "errors",
            "clock",
            "config",
            "env",
            "tools.types",
            "policy",
            "viewer.assets",
            "viewer.episodes",
            "viewer.summary",
        }
    ),
    "testing": frozenset({"errors", "clock", "tools.types", "policy", "env", "sandbox", "rollout"}),
    "cli": frozenset({"*"}),
}

HEAVY = {"nemo_gym", "ray", "torch", "transformers"}


def modules() -> list[Path]:
    links = [PACKAGE, *(p for p in (PACKAGE / "envs").resolve().iterdir() if p.is_dir())]
    own = [p for p in links[0].rglob("*.py") if "envs" not in p.relative_to(PACKAGE).parts[:1]]
    families = [p for family in links[1:] for p in family.rglob("*.py") if "tests" not in p.parts]
    return sorted(own + families)


def room_of(path: Path) -> str:
    if not path.is_relative_to(PACKAGE):
        return "apps" if path.name == "app.py" else "envs"
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    """Every module an `import` anywhere in the file names, with its line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def allowed(room: str, target: str) -> bool:
    """May a module of `room` import `target` (a dotted path below the package)?"""
    may = MAY_IMPORT[room]
    head = target.split(".")[0]
    if "*" in may or head in ("__version__", room):
        return True
    return any(target == entry or target.startswith(f"{entry}.") for entry in may)


def problems_of(path: Path) -> Iterator[str]:
    """What a module imports that it must not."""
    room = room_of(path)
    if room not in MAY_IMPORT:
        yield f"{room} is a new room: give it its place in MAY_IMPORT"
        return
    for name, line in imports_of(path):
        package, _, target = name.partition(".")
        if package == "prorl_envs" and target:
            if not allowed(room, target):
                yield f"{path}:{line}: {room} must not import {target}"
            if room == "envs" and target.startswith("envs."):
                family = path.relative_to((PACKAGE / "envs").resolve()).parts[0]
                if target.split(".")[1] != family:
                    yield f"{path}:{line}: families do not import each other"
        if package in HEAVY:
            own = {"nemo_gym": room == "nemo" or path.name == "app.py", "ray": path.name == "ray_nodes.py"}
            if not own.get(package):
                yield f"{path}:{line}: {room} imports {package}"


def test_imports_point_inward() -> None:
    assert len(modules()) > 300
    assert not [problem for path in modules() for problem in problems_of(path)]


def test_an_import_outward_is_noticed() -> None:
    assert allowed("rollout", "policy.types") and not allowed("policy", "rollout.types")
    assert not allowed("viewer", "rollout.watch") and not allowed("gym", "cli.main")


def test_importing_the_package_stays_light() -> None:
    """A trainer that imports the client pays for no NeMo Gym, Ray or torch."""
    program = (
        "import sys, prorl_envs, prorl_envs.rollout.client, prorl_envs.env.registry, prorl_envs.cli.main\n"
        f"heavy = {HEAVY!r} & {{name.split('.')[0] for name in sys.modules}}\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
