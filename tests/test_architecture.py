"""Allowed imports between packages. A new dependency needs a reason and a line in this file."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "prorl_envs"
TESTING = "prorl_envs.testing."

#: Allowed imports of each package within `prorl_envs`: whole packages, or single modules.
MAY_IMPORT: dict[str, frozenset[str]] = {
    "__init__": frozenset({"*"}),  # the public API, imported on first use
    "errors": frozenset(),
    "strict_json": frozenset(),
    "clock": frozenset(),
    "stop_signals": frozenset(),
    "window": frozenset(),
    "extras": frozenset(),
    "config": frozenset({"errors"}),
    "listener": frozenset({"errors"}),
    "sandbox": frozenset({"errors", "extras"}),
    # A tool server in its sandbox's own pid namespace asks the first process to kill the others.
    "tools": frozenset(
        {
            "errors",
            "strict_json",
            "window",
            "sandbox.base",
            "sandbox.filesystem.directories",  # Jupyter's sockets need a short path
            "sandbox.linux.descriptors",
            "sandbox.template.sandbox_init",
        }
    ),
    "images": frozenset(
        {
            "errors",
            "clock",
            "sandbox.drivers.apptainer_probe",  # Apptainer builds images too
            "sandbox.filesystem.sif",
            "sandbox.filesystem.directories",
            "sandbox.filesystem.layer_leases",
            "sandbox.filesystem.layered",
            "sandbox.filesystem.mount_plan",  # the default of PATH
            "sandbox.linux.children",
            "sandbox.linux.syscall_wrappers",
            # Builds of Dockerfiles run in sandboxes.
            "sandbox.base",
            "sandbox.network.proxy",  # downloads of ADD
            "tools.client",
            "tools.types",
        }
    ),
    "conformance": frozenset({"errors", "sandbox", "tools"}),
    # A task may name an image that must be pulled or built first.
    "env": frozenset({"errors", "strict_json", "extras", "sandbox", "images", "tools"}),
    "envs": frozenset({"errors", "extras", "sandbox", "images", "tools", "env"}),
    "remote": frozenset({"errors", "clock", "tools.types", "env"}),  # NeMo Gym's servers, over HTTP only
    "catalog": frozenset({"errors", "config", "sandbox.base", "env", "remote"}),
    "apps": frozenset({"nemo"}),  # a family's NeMo Gym server
    "gym": frozenset({"errors", "strict_json", "sandbox", "tools", "env", "config", "catalog"}),
    # A server opens its node as commands do; the agent and the environment server are clients of the rollout
    # service, and run groups as trainers do.
    "nemo": frozenset(
        {"errors", "strict_json", "sandbox", "images", "tools", "env", "config", "catalog", "model.types"}
        | {"rollout.api", "rollout.client", "app.compose", "trainers.rollouts"}
    ),
    # Clients of the rollout service that speak a trainer's language; each imports its trainer lazily.
    "trainers": frozenset({"errors", "model.types", "rollout.api", "rollout.client"}),
    # Sandboxes for other frameworks, which open their node as commands do.
    "integrations": frozenset(
        {"errors", "extras", "config", "sandbox", "images", "tools", "env", "app.compose", "nemo.images"}
        | {"envs.terminal.machines"}
    ),
    "model": frozenset({"errors", "strict_json", "clock", "window", "tools.types"}),
    "viewer": frozenset({"errors", "strict_json", "rollout.api", "rollout.client.result_files", "runs"}),
    # A service serves the pages that display it.
    "rollout": frozenset(
        {
            "errors",
            "strict_json",
            "clock",
            "config",
            "extras",
            "listener",
            "stop_signals",
            "env",
            "tools.types",
            "model",
            "viewer.assets",
            "viewer.markdown",
        }
    ),
    "runs": frozenset({"errors", "rollout.api", "rollout.client"}),
    "exports": frozenset({"errors", "strict_json", "extras", "rollout.api", "runs"}),
    "loggers": frozenset({"errors", "extras", "rollout.api.summary", "runs"}),
    "testing": frozenset({"errors", "clock", "tools.types", "model", "env", "sandbox", "rollout"}),
    # The composition root builds all parts, and prints nothing.
    "app": frozenset(
        {"errors", "clock", "config", "sandbox", "images", "env", "catalog", "model", "rollout", "extras"}
    ),
    "cli": frozenset({"*"}),
}

#: The parts of each package, lowest first: a part may import only earlier parts.
ORDER: dict[str, tuple[str, ...]] = {
    "sandbox": ("base", "linux", "network", "filesystem", "template", "limits", "drivers"),
    "tools": ("types", "schemas", "protocol", "server", "client", "pool"),
    "model": ("types", "answer_checks", "http", "tool_formats", "tokens", "servers", "routing"),
    "rollout": (
        "api",
        "client",
        "agent",
        "scheduling",
        "store",
        "endpoint",
        "episode",
        "batches",
        "nodes",
        "monitoring",
        "service",
        "http",
    ),
    "cli": ("output", "run_loop", "options", "run_folders", "sources", "commands", "main"),
}

#: Folders of `tests/` that test no single package: attacks, other programs, and parts outside the package.
SUITES = {"attacks", "bench", "docs", "faults", "fuzz", "learn", "llamacpp", "support", "vllm"}
#: Packages without a folder of their own in `tests/`: `app` composes all others, and the tests of `cli` and
#: `rollout` run it; the families' tests are beside them.
TESTED_ELSEWHERE = {"app", "envs"}

#: Packages whose tests run commands or their own fakes.
BY_COMMAND = {"cli", "nemo"}
#: Tests whose fixtures import the package, and one of a family in the environment of another package.
BY_FIXTURE = (
    "rollout/paper/test_replayed.py",
    "rollout/paper/test_unmodified.py",
    "trainers/real/test_harbor_tasks.py",
)

HEAVY = {"nemo_gym", "ray", "torch", "transformers"}


def modules() -> list[Path]:
    links = [PACKAGE, *(p for p in (PACKAGE / "envs").resolve().iterdir() if p.is_dir())]
    own = [p for p in links[0].rglob("*.py") if "envs" not in p.relative_to(PACKAGE).parts[:1]]
    families = [p for family in links[1:] for p in family.rglob("*.py") if "tests" not in p.parts]
    return sorted(own + families)


def package_of(path: Path) -> str:
    if not path.is_relative_to(PACKAGE):
        return "apps" if path.parent.name == "server" and path.parts[-3] == "nemo" else "envs"
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    """Yield each module that an `import` anywhere in the file names, with its line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def allowed(package: str, target: str) -> bool:
    """Return whether a module of `package` may import `target` (a dotted path below the package)."""
    may = MAY_IMPORT[package]
    head = target.split(".")[0]
    if "*" in may or head in ("__version__", package):
        return True
    return any(target == entry or target.startswith(f"{entry}.") for entry in may)


def problems_of(path: Path) -> Iterator[str]:
    """Return the forbidden imports of a module."""
    package = package_of(path)
    if package not in MAY_IMPORT:
        yield f"{package} is a new package: give it its place in MAY_IMPORT"
        return
    for name, line in imports_of(path):
        root, _, target = name.partition(".")
        if root == "prorl_envs" and target:
            if not allowed(package, target):
                yield f"{path}:{line}: {package} must not import {target}"
            if package == "envs" and target.startswith("envs."):
                family = path.relative_to((PACKAGE / "envs").resolve()).parts[0]
                if target.split(".")[1] != family:
                    yield f"{path}:{line}: families do not import each other"
        if root in HEAVY:
            own = {"nemo_gym": package == "nemo" or path.name == "app.py", "ray": path.name == "ray.py"}
            if not own.get(root):
                yield f"{path}:{line}: {package} imports {root}"


def test_imports_point_inward() -> None:
    assert len(modules()) > 300
    assert not [problem for path in modules() for problem in problems_of(path)]


def test_an_import_outward_is_noticed() -> None:
    assert allowed("rollout", "model.types") and not allowed("model", "rollout.api.types")
    assert not allowed("viewer", "rollout.monitoring.dashboard_state") and not allowed("gym", "cli.main")
    assert allowed("app", "rollout.service.service") and not allowed("app", "cli.main")


def out_of_order(package: str, module: str, target: str) -> bool:
    """Return whether `module` of `package` imports a later part of the same package."""
    order, part = ORDER[package], target.split(".")[1]
    return part in order and order.index(part) > order.index(module.split(".")[1])


@pytest.mark.parametrize("package", ORDER)
def test_imports_between_the_parts_of_a_package_point_one_way(package: str) -> None:
    against = set()
    for path in (PACKAGE / package).rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        if path == PACKAGE / package / "__init__.py":
            continue
        for name, _ in imports_of(path):
            target = name.removeprefix("prorl_envs.")
            if target.startswith(f"{package}.") and out_of_order(package, module, target):
                against.add((module, target))
    assert not against


@pytest.mark.parametrize("package", ORDER)
def test_each_part_of_a_package_is_listed(package: str) -> None:
    parts = {path.name.removesuffix(".py") for path in (PACKAGE / package).iterdir()}
    assert parts - {"__init__", "__pycache__", "scaffold"} == set(ORDER[package])
    assert len(ORDER[package]) <= 12


def run_imports_of(node: ast.AST) -> Iterator[str]:
    """Yield the names that the code below a node imports when it runs, so not those for types alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        yield from run_imports_of(child)


def test_no_files_import_each_other_in_a_circle() -> None:
    files = {name_of(path): path for path in modules() if path.is_relative_to(PACKAGE)}
    graph = {}
    for module, path in files.items():
        names = set(run_imports_of(ast.parse(path.read_text())))
        # The public API is imported on first use.
        graph[module] = ({*names, *(name.rpartition(".")[0] for name in names)} & set(files)) - {"prorl_envs"}
    TopologicalSorter(graph).prepare()  # raises CycleError


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def test_an_import_against_the_order_is_noticed() -> None:
    assert out_of_order("rollout", "rollout.api.types", "rollout.store.base.StoredGroup")
    assert not out_of_order("rollout", "rollout.store.base", "rollout.api.types.Result")


def test_importing_the_package_stays_light() -> None:
    """A trainer that imports the client does not load NeMo Gym, Ray or torch."""
    program = (
        "import sys, prorl_envs, prorl_envs.rollout.client.client\n"
        "import prorl_envs.env.registry, prorl_envs.cli.main\n"
        f"heavy = {HEAVY!r} & {{name.split('.')[0] for name in sys.modules}}\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_the_client_loads_no_service() -> None:
    """The client and the types of the HTTP interface are enough for a trainer."""
    program = (
        "import sys, prorl_envs.rollout.client.client\n"
        "print(*(name for name in sys.modules if name.startswith('prorl_envs.rollout.')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert {name.split(".")[2] for name in done.stdout.split()} == {"api", "client"}


def test_public_class_names_are_unique() -> None:
    places: dict[str, list[str]] = {}
    for path in modules():
        if path.is_relative_to(PACKAGE):  # the classes of two families never share a namespace
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(f"{path}:{node.lineno}")
    assert len(places) > 500
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_every_package_states_its_responsibility_and_where_to_begin() -> None:
    packages = [
        path for path in PACKAGE.rglob("__init__.py") if "envs" not in path.relative_to(PACKAGE).parts
    ]
    assert len(packages) > 40
    for path in packages:
        stated = ast.get_docstring(ast.parse(path.read_text())) or ""
        if path.parent.name in ("prorl_envs", "gym", "nemo"):  # begin with the pages that show their use
            assert stated, path
            continue
        begin = re.search(r"Begin with `([\w/]+\.py)`\.$", stated)
        assert begin and (path.parent / begin[1]).is_file() and stated.count("\n") <= 2, path


def test_only_fakes_that_a_command_or_a_user_starts_are_shipped() -> None:
    imports = {
        path.stem: {name.split(".")[2] for name, _ in imports_of(path) if name.startswith(TESTING)}
        for path in (PACKAGE / "testing").glob("[!_]*.py")
    }
    reached: set[str] = set()
    needed = {
        name.split(".")[2]
        for path in modules()
        if package_of(path) != "testing"
        for name, _ in imports_of(path)
        if name.startswith(TESTING)
    }
    while needed - reached:
        reached |= needed
        needed = set().union(*(imports[name] for name in reached))
    assert len(reached) > 4
    assert set(imports) == reached, "move the others to tests/support"


def test_no_shipped_module_imports_the_tests() -> None:
    assert not [
        f"{path}:{line}" for path in modules() for name, line in imports_of(path) if name.startswith("tests.")
    ]


def test_the_tests_mirror_the_packages() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - TESTED_ELSEWHERE
    folders = {path.name for path in TESTS.iterdir() if path.is_dir() and not path.name.startswith("__")}
    assert folders == packages | SUITES


@pytest.mark.parametrize("package", ["images", "model", "rollout", "sandbox", "tools"])
def test_the_folders_of_a_package_are_those_of_its_tests(package: str) -> None:
    parts = {path.parent.name for path in (PACKAGE / package).glob("*/__init__.py")}
    folders = {path.parent.name for path in (TESTS / package).glob("*/test_*.py")}
    assert folders - parts == ({"paper"} if package == "rollout" else set())


def test_each_test_is_in_the_folder_of_a_package_that_it_imports() -> None:
    misplaced = set()
    for path in TESTS.rglob("test_*.py"):
        place = path.relative_to(TESTS)
        names = {name.split(".")[1] for name, _ in imports_of(path) if name.startswith("prorl_envs.")}
        if (
            names - {"errors", "testing"}
            and len(place.parts) > 1
            and place.parts[0] not in SUITES | BY_COMMAND | names
        ):
            misplaced.add(place.as_posix())
    assert misplaced == set(BY_FIXTURE)
