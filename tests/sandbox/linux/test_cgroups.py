"""Control groups: discovery and contents, on a fake tree of files, because machines differ."""

import os
from pathlib import Path

import pytest

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.base import SandboxLimits
from prorl_envs.sandbox.linux.cgroups import (
    ControlGroup,
    ControlGroups,
    Mechanism,
    delegated,
    find_groups,
    sessions_weigh_alike,
    settings,
    sweep_groups,
)

LIMITS = SandboxLimits(memory_bytes=1 << 30, processes=100, cpus=1.5)


def unified_tree(tmp_path: Path, *, controllers: str = "cpu io memory pids", processes: str = "") -> Path:
    """Make a /proc whose process is in a delegated group, `tree/app.scope`. Return the path of the /proc."""
    tree, proc = tmp_path / "tree", tmp_path / "proc"
    group = tree / "app.scope"
    group.mkdir(parents=True)
    (proc / "self").mkdir(parents=True)
    (group / "cgroup.controllers").write_text(controllers + "\n")
    (group / "cgroup.procs").write_text(processes)
    (group / "cgroup.subtree_control").touch()
    odd = os.fsdecode("/mnt/\r\x0b\x1c\u2028 x".replace(" ", "\\040").encode() + b"\xff")
    (proc / "self/mountinfo").write_bytes(
        os.fsencode(
            f"30 1 0:2 / {odd} rw - tmpfs tmpfs rw\n"
            f"31 1 0:3 / {tree} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
        )
    )
    (proc / "self/cgroup").write_text("0::/app.scope\n")
    return proc


def test_a_delegated_group_is_emptied_and_delegates_its_controllers(tmp_path: Path) -> None:
    proc = unified_tree(tmp_path, processes=f"{os.getpid()}\n")
    place = tmp_path / "tree/app.scope"
    assert delegated(proc) == (place, "")
    (place / "prorl-service").mkdir()
    groups = find_groups(Mechanism.AUTO, proc)
    assert groups is not None
    assert (place / "prorl-service/cgroup.procs").read_text() == str(os.getpid())
    assert (place / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"
    assert (groups.place, groups.controllers) == (place, ("memory", "pids", "cpu"))


def test_another_driver_of_the_same_service_finds_the_same_group(tmp_path: Path) -> None:
    proc = unified_tree(tmp_path)
    (proc / "self/cgroup").write_text("0::/app.scope/prorl-service\n")
    assert delegated(proc) == (tmp_path / "tree/app.scope", "")


def test_other_processes_in_the_group_are_not_moved(tmp_path: Path) -> None:
    proc = unified_tree(tmp_path, processes=f"{os.getpid()}\n1\n")
    assert find_groups(Mechanism.AUTO, proc) is None
    with pytest.raises(SandboxError, match="other processes run in") as caught:
        find_groups(Mechanism.CGROUP2, proc)
    assert "Delegate=yes" in caught.value.hint
    assert (tmp_path / "tree/app.scope/cgroup.subtree_control").read_text() == ""


def test_without_the_controllers_the_watchdog_enforces_the_limits(tmp_path: Path) -> None:
    proc = unified_tree(tmp_path, controllers="hugetlb")
    assert delegated(proc)[1].endswith("has no controller memory, pids")
    assert find_groups(Mechanism.AUTO, proc) is None


def test_the_watchdog_can_be_requested(tmp_path: Path) -> None:
    assert find_groups(Mechanism.WATCHDOG, unified_tree(tmp_path)) is None


def test_limits_are_written_to_the_groups_files() -> None:
    assert settings(LIMITS, 10) == {
        "cpu.weight.nice": "10",
        "memory.max": str(1 << 30),
        "pids.max": "100",
        "cpu.max": "150000 100000",
    }
    assert settings(SandboxLimits(memory_bytes=None, processes=None), 0) == {"cpu.weight.nice": "0"}


def test_a_group_reports_the_kernels_counters(tmp_path: Path) -> None:
    group = ControlGroups(tmp_path, ("memory", "pids")).group("abc-1")
    group.make(LIMITS, 10)
    folder = tmp_path / "prorl-abc-1"
    assert group.folder == folder
    assert (folder / "memory.max").read_text() == str(1 << 30)
    assert not (folder / "cpu.max").exists()  # this controller does not exist here
    group.add(77)
    assert (folder / "cgroup.procs").read_text() == "77"
    (folder / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    assert group.killed() == 2


def test_a_group_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    group = ControlGroup(tmp_path / "absent/prorl-abc-1", ("memory",))
    with pytest.raises(SandboxError, match="cannot make a sandbox's control group"):
        group.make(LIMITS, 10)


def test_groups_of_a_killed_service_are_removed_and_no_others(tmp_path: Path) -> None:
    place = tmp_path / "groups"
    for name in ("prorl-abc-1", "prorl-abc-12", "prorl-abcd-1", "other"):
        (place / name).mkdir(parents=True)
    directory = tmp_path / "driver"
    directory.mkdir()
    ControlGroups(place, ("memory", "pids")).record(directory, "abc")
    sweep_groups(directory)
    assert sorted(path.name for path in place.iterdir()) == ["other", "prorl-abcd-1"]


def test_a_directory_without_groups_has_none_to_remove(tmp_path: Path) -> None:
    sweep_groups(tmp_path)


def test_sessions_have_equal_weights_only_without_a_group_that_has_a_weight(tmp_path: Path) -> None:
    proc = unified_tree(tmp_path)
    assert not sessions_weigh_alike(proc)  # a kernel without weights
    switch = proc / "sys/kernel/sched_autogroup_enabled"
    switch.parent.mkdir(parents=True)
    switch.write_text("0\n")
    assert not sessions_weigh_alike(proc)
    switch.write_text("1\n")
    assert sessions_weigh_alike(proc)
    (tmp_path / "tree/app.scope/cpu.weight").write_text("100\n")
    assert not sessions_weigh_alike(proc)
    (proc / "self/cgroup").write_text("3:cpu,cpuacct:/\n0::/app.scope\n")
    assert sessions_weigh_alike(proc)
    (proc / "self/cgroup").write_text("3:cpu,cpuacct:/slurm/job\n0::/app.scope\n")
    assert not sessions_weigh_alike(proc)
