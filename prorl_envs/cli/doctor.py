"""`prorl-envs doctor`: what this machine can do, in a form one can paste into a bug report."""

import asyncio
import json
import os
import platform
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from rich.table import Table
from rich.text import Text

from prorl_envs import __version__
from prorl_envs.cli.compose import node
from prorl_envs.cli.console import out
from prorl_envs.config import Settings
from prorl_envs.env.node import default_cache_dir
from prorl_envs.env.registry import environments, example_path, load_tasks
from prorl_envs.env.sandboxed import workplace
from prorl_envs.errors import InputError, SandboxError
from prorl_envs.sandbox.apptainer_probe import apptainer_checks, image_checks
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.cgroups import Mechanism, delegated, find_groups, sessions_weigh_alike
from prorl_envs.sandbox.choice import choose_driver
from prorl_envs.sandbox.files import node_local_base
from prorl_envs.sandbox.instance_probe import instance_check
from prorl_envs.sandbox.probe import Check, bubblewrap_checks, enclosure_checks, machine_checks


def _machine() -> Iterator[tuple[str, str]]:
    yield "prorl-envs", __version__
    yield "Python", f"{platform.python_version()} on {platform.platform()}"
    yield "user", f"uid {os.geteuid()}, {os.cpu_count()} cores"
    yield "NeMo Gym", "installed" if find_spec("nemo_gym") else "not installed (the `nemo` extra)"
    yield "Ray", "installed" if find_spec("ray") else "not installed (the `ray` extra)"


async def _sandbox(settings: Settings) -> Check:
    """Start a sandbox and have its shell answer: what all the other checks are about."""
    remedy = "the checks above say what is missing"
    try:
        async with node(settings) as opened, workplace(opened, SandboxSpec()) as place:
            answer = await place.tools.bash("echo $((6 * 7))", timeout_s=20.0)
    except SandboxError as error:
        return Check(name="sandbox", ok=False, found=error.message, remedy=error.hint or remedy)
    ok = answer.text.strip() == "42"
    return Check(name="sandbox", ok=ok, found="starts and answers" if ok else answer.text, remedy=remedy)


def _limits(settings: Settings) -> Check:
    """What keeps the limits of sandboxes. The watchdog does everywhere, but later than the kernel would."""
    asked = settings.limits.mechanism
    place, problem = delegated()
    if place is not None and asked in ("auto", "cgroup2"):
        return Check(name="limits", ok=True, found=f"cgroup v2 delegated: {place}")
    if asked == "cgroup2":
        remedy = "`systemd-run --user --scope -p Delegate=yes prorl-envs serve`, or limits.mechanism watchdog"
        return Check(name="limits", ok=False, found=f"no cgroup v2: {problem}", remedy=remedy)
    if asked == "cgroup1":
        try:
            find_groups(Mechanism.CGROUP1)
        except SandboxError as error:
            return Check(name="limits", ok=False, found=error.message, remedy=error.hint)
        return Check(name="limits", ok=True, found="cgroup v1")
    why = "" if asked == "watchdog" else f" (no cgroup v2: {problem})"
    return Check(name="limits", ok=True, found=f"watchdog{why}")


def _priority(settings: Settings) -> Check:
    """Whether `limits.nice` makes a difference."""
    if settings.limits.mechanism != "cgroup1" and delegated()[0] is None and sessions_weigh_alike():
        found = "sandboxes do not yield to the service: sched_autogroup shares processors out by session"
        remedy = "`sysctl kernel.sched_autogroup_enabled=0`, or a job with a CPU control group of its own"
        return Check(name="priority", ok=False, found=found, remedy=remedy)
    return Check(name="priority", ok=True, found=f"sandboxes yield by nice {settings.limits.nice}")


def _cache(folder: Path) -> Check:
    """What is built once must have a place."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return Check(name="cache", ok=True, found=str(folder), remedy="")
    except OSError as error:
        found = f"cannot write {folder}: {error.strerror}"
        return Check(name="cache", ok=False, found=found, remedy="set PRORL_CACHE_DIR to another folder")


def _families() -> Iterator[Check]:
    for name in sorted(environments()):
        try:
            tasks = load_tasks(name, example_path(name))
            missing = [r for r in (environments()[name].unavailable(task) for task in tasks) if r]
        except InputError as error:
            yield Check(name=name, ok=False, found=error.message, remedy=error.hint)
            continue
        found = f"{len(tasks) - len(missing)} of {len(tasks)} example tasks can run here"
        if missing:
            found += f" ({missing[0]})"
        yield Check(name=name, ok=len(missing) < len(tasks), found=found, remedy="see the reason in brackets")


def _drivers(settings: Settings) -> tuple[list[Check], list[Check]]:
    """The checks of the driver that is used here, and those of what is not needed for it. Blocks."""
    common = list(machine_checks(settings.run_dir))
    found = {
        "namespaces": [*common, *enclosure_checks(settings.run_dir)],
        "bubblewrap": [*common, *bubblewrap_checks(settings.run_dir, settings.bwrap)],
        "apptainer": list(apptainer_checks(settings.run_dir, settings.apptainer, settings.bwrap)),
        "instance": [instance_check(settings.run_dir or node_local_base(), settings.apptainer)],
        "local": [],
    }
    try:
        name = choose_driver(
            settings.driver, settings.run_dir, bwrap=settings.bwrap, apptainer=settings.apptainer
        )
        said = f"{name} ({settings.driver})"
        if name == "local":
            said = "local: NO ISOLATION, what a model writes runs as this user"
        chosen = Check(name="driver", ok=True, found=said)
    except SandboxError as error:
        name = "namespaces"
        chosen = Check(name="driver", ok=False, found=error.message, remedy=error.hint)
    needed = [*found.pop(name), chosen]
    others = dict.fromkeys(check for checks in found.values() for check in checks if check not in needed)
    return needed, list(others)


async def doctor(settings: Settings, *, as_json: bool = False) -> bool:
    """Look at this machine and say what was found.

    Args:
        as_json: print JSON instead of a table.

    Returns:
        whether rollouts can run here.
    """
    needed, others = await asyncio.to_thread(_drivers, settings)
    needed.append(_limits(settings))
    needed.append(await _sandbox(settings))
    needed.append(_cache(settings.cache_dir or default_cache_dir()))
    needed += await asyncio.to_thread(lambda: list(_families()))
    others += await asyncio.to_thread(lambda: list(image_checks()))
    others.append(_priority(settings))
    fit = all(check.ok for check in needed)
    if as_json:
        _print_json(fit, needed, others)
    else:
        _print_tables(needed, others)
    return fit


def _print_json(fit: bool, needed: Sequence[Check], others: Sequence[Check]) -> None:
    checks = [{**asdict(check), "needed": check in needed} for check in (*needed, *others)]
    out.print(
        json.dumps({"fit": fit, "machine": dict(_machine()), "checks": checks}, indent=2), soft_wrap=True
    )


def _print_tables(needed: Sequence[Check], others: Sequence[Check]) -> None:
    for name, value in _machine():
        out.print(f"{name + ':':12} {value}")
    table = Table(show_edge=False)
    table.add_column("check")
    table.add_column("")
    table.add_column("found", overflow="fold")
    for check in needed:
        _add_row(table, check, Text("no", style="bold red"))
    table.add_section()
    for check in others:
        _add_row(table, check, Text("--", style="yellow"))
    out.print(table)
    out.print("-- is not needed here")


def _add_row(table: Table, check: Check, bad: Text) -> None:
    mark = Text("ok", style="green") if check.ok else bad
    table.add_row(check.name, mark, check.found if check.ok else f"{check.found}\nremedy: {check.remedy}")
