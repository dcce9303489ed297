"""`prorl-envs doctor`: report on the features that this machine supports; useful in bug reports."""

import asyncio
import os
import platform
import resource
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from rich.table import Table
from rich.text import Text

from prorl_envs import __version__
from prorl_envs.app.compose import node
from prorl_envs.cli.commands.envs_report import example_obstacles
from prorl_envs.cli.output.console import out, print_json
from prorl_envs.config import Settings
from prorl_envs.env.node import default_cache_dir
from prorl_envs.env.registry import environments
from prorl_envs.env.sandboxed import sandbox_session
from prorl_envs.errors import InputError, SandboxError
from prorl_envs.extras import install_extras
from prorl_envs.sandbox.base import SandboxSpec
from prorl_envs.sandbox.drivers.apptainer_probe import apptainer_checks, image_checks
from prorl_envs.sandbox.drivers.instance.probe import instance_check
from prorl_envs.sandbox.drivers.probe import Check, bubblewrap_checks, directory_check
from prorl_envs.sandbox.drivers.select import choose_driver
from prorl_envs.sandbox.filesystem.directories import node_local_base
from prorl_envs.sandbox.limits.kernel_counters import UNLIMITED, counters
from prorl_envs.sandbox.linux.cgroups import delegated, sessions_weigh_alike


def _machine() -> Iterator[tuple[str, str]]:
    yield "prorl-envs", __version__
    yield "Python", f"{platform.python_version()} on {platform.platform()}"
    yield "user", f"uid {os.geteuid()}, {os.cpu_count()} cores"
    yield "NeMo Gym", "installed" if find_spec("nemo_gym") else f"not installed ({install_extras('nemo')})"
    yield "Ray", "installed" if find_spec("ray") else f"not installed ({install_extras('ray')})"


async def _sandbox(settings: Settings) -> Check:
    """Check that a sandbox starts and runs a command in its shell."""
    remedy = "the checks above name the missing parts"
    try:
        async with node(settings) as opened, sandbox_session(opened, SandboxSpec()) as session:
            answer = await session.tools.bash("echo $((6 * 7))", timeout_s=20.0)
    except SandboxError as error:
        return Check(name="sandbox", ok=False, found=error.message, remedy=error.hint or remedy)
    ok = answer.text.strip() == "42"
    return Check(name="sandbox", ok=ok, found="starts and answers" if ok else answer.text, remedy=remedy)


def _limits(settings: Settings) -> Check:
    """Check how sandbox limits are enforced. The watchdog works on every machine, but reacts later."""
    enforcement = settings.limits.enforcement
    cgroup, problem = delegated()
    if cgroup is not None and enforcement in ("auto", "cgroup2"):
        return Check(name="limits", ok=True, found=f"cgroup v2 delegated: {cgroup}")
    if enforcement == "cgroup2":
        remedy = (
            "`systemd-run --user --scope -p Delegate=yes prorl-envs serve`, or limits.enforcement watchdog"
        )
        return Check(name="limits", ok=False, found=f"no cgroup v2: {problem}", remedy=remedy)
    reason = "" if enforcement == "watchdog" else f" (no cgroup v2: {problem})"
    return Check(name="limits", ok=True, found=f"watchdog{reason}")


def _shared() -> Check:
    """Report the kernel counters that all sandboxes of this user share, and one sandbox's share."""
    found = [
        f"{counter.name}: {_number(counter.size)} ({counter.source}), {counter.share:,} for each sandbox"
        for counter in counters().values()
    ]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    found.append(f"the service's hard limit of open files: {_number(hard if hard >= 0 else UNLIMITED)}")
    return Check(name="shared counters", ok=True, found="; ".join(found))


def _number(size: int) -> str:
    return f"{size:,}" if size < UNLIMITED else "no limit"


def _priority(settings: Settings) -> Check:
    """Check whether the setting `limits.nice` has an effect."""
    if delegated()[0] is None and sessions_weigh_alike():
        found = "limits.nice has no effect: sched_autogroup divides processor time equally between sessions"
        remedy = "`sysctl kernel.sched_autogroup_enabled=0`, or a job with its own CPU control group"
        return Check(name="priority", ok=False, found=found, remedy=remedy)
    return Check(name="priority", ok=True, found=f"sandboxes have nice {settings.limits.nice}")


def _cache(folder: Path) -> Check:
    """Check that the cache folder can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return Check(name="cache", ok=True, found=str(folder), remedy="")
    except OSError as error:
        found = f"cannot write {folder}: {error.strerror}"
        return Check(name="cache", ok=False, found=found, remedy="set PRORL_CACHE_DIR to another folder")


def _families(driver: str) -> Iterator[tuple[Check, bool]]:
    """Yield a check per family, and whether the check is required.

    It is not required if this machine can run none of the family's examples, as without optional packages.
    """
    for name in sorted(environments()):
        try:
            obstacles = example_obstacles(name, environments()[name], driver)
        except InputError as error:
            yield Check(name=name, ok=False, found=error.message, remedy=error.hint), True
            continue
        missing = [obstacle for obstacle in obstacles if obstacle]
        able = len(missing) < len(obstacles)
        found = f"{len(obstacles) - len(missing)} of {len(obstacles)} example tasks can run here"
        if missing:
            found += f" ({missing[0]})"
        yield Check(name=name, ok=able, found=found, remedy="see the reason in brackets"), able


def _drivers(settings: Settings) -> tuple[list[Check], list[Check]]:
    """Return the required checks, of the selected driver, and the optional checks, of the others. Blocks.

    The last required check says which driver is selected, or that no driver works.
    """
    directory = directory_check(node_local_base(settings.run_dir))
    found = {
        "bubblewrap": list(bubblewrap_checks(settings.run_dir, settings.bwrap)),
        "apptainer": list(apptainer_checks(settings.run_dir, settings.apptainer, settings.bwrap)),
        "apptainer-instance": [instance_check(node_local_base(settings.run_dir), settings.apptainer)],
        "local": [],
    }
    try:
        name = choose_driver(
            settings.driver, settings.run_dir, bwrap=settings.bwrap, apptainer=settings.apptainer
        )
        selected = f"{name} ({settings.driver})"
        if name == "local":
            selected = "local: NO ISOLATION, a model's commands run as this user"
        needed = [directory, *found.pop(name), Check(name="driver", ok=True, found=selected)]
    except SandboxError as error:
        needed = [directory, Check(name="driver", ok=False, found=error.message, remedy=error.hint)]
    others = dict.fromkeys(check for checks in found.values() for check in checks if check not in needed)
    return needed, list(others)


async def doctor(settings: Settings, *, as_json: bool = False) -> bool:
    """Check this machine and print the findings.

    Args:
        settings: all settings.
        as_json: print JSON instead of a table.

    Returns:
        True if rollouts can run on this machine.
    """
    needed, others = await asyncio.to_thread(_drivers, settings)
    starts = needed[-1].ok
    needed += [_limits(settings), _shared()]
    if starts:
        needed.append(sandbox := await _sandbox(settings))
        starts = sandbox.ok
    needed.append(_cache(settings.cache_dir or default_cache_dir()))
    if starts:
        for check, able in await asyncio.to_thread(lambda: list(_families(settings.driver))):
            (needed if able else others).append(check)
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
    print_json({"fit": fit, "machine": dict(_machine()), "checks": checks})


def _print_tables(needed: Sequence[Check], others: Sequence[Check]) -> None:
    for name, value in _machine():
        out.print(f"{name + ':':12} {value}")
    table = Table(show_edge=False)
    table.add_column("check")
    table.add_column("")
    table.add_column("found", overflow="fold")
    shown: set[str] = set()
    for check in needed:
        _add_row(table, check, Text("no", style="bold red"), shown)
    table.add_section()
    for check in others:
        _add_row(table, check, Text("--", style="yellow"), shown)
    out.print(table)
    out.print("--: optional, or not needed on this machine")


def _add_row(table: Table, check: Check, bad: Text, shown: set[str]) -> None:
    """Add a check, with its remedy unless the remedy is already in `shown`."""
    found = check.found
    if not check.ok and not any(check.remedy in remedy for remedy in shown):
        shown.add(check.remedy)
        found += f"\nremedy: {check.remedy}"
    table.add_row(check.name, Text("ok", style="green") if check.ok else bad, found)
