"""Causes and remedies of refused user namespaces, on imitated machines."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from prorl_envs.sandbox.linux import user_namespaces
from prorl_envs.sandbox.linux.user_namespaces import refusal_of

ROOT_MOUNT = "22 1 254:0 / / rw - ext4 /dev/vda rw\n"


def machine(
    folder: Path,
    *,
    settings: Mapping[str, str],
    mounts: str = ROOT_MOUNT,
    first: str = "",
    capabilities: str = "0",
) -> Path:
    """Make a directory like /proc. `first` holds the mounts of the first process."""
    if first:
        (folder / "1").mkdir(parents=True)
        (folder / "1/mountinfo").write_text(first)
    for name, value in settings.items():
        path = folder / "sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    (folder / "self").mkdir(parents=True)
    (folder / "self/mountinfo").write_text(mounts)
    (folder / "self/status").write_text(f"Name:\tx\nCapEff:\t{capabilities}\n")
    return folder


@pytest.mark.parametrize(
    ("settings", "mounts", "cause", "remedy"),
    [
        ({"user/max_user_namespaces": "0"}, ROOT_MOUNT, "max_user_namespaces=0", "max_user_namespaces=65536"),
        ({"user/max_net_namespaces": "0"}, ROOT_MOUNT, "max_net_namespaces=0", "max_net_namespaces=65536"),
        ({"kernel/unprivileged_userns_clone": "0"}, ROOT_MOUNT, "userns_clone=0", "userns_clone=1"),
        (
            {"kernel/apparmor_restrict_unprivileged_userns": "1"},
            ROOT_MOUNT,
            "AppArmor",
            "restrict_unprivileged_userns=0",
        ),
        ({}, "22 1 254:0 / /proc rw - proc proc rw\n", "chroot", "outside"),
        ({}, "22 1 254:0 / /a\x0b\u2028b rw - proc proc rw\n", "chroot", "outside"),
        ({"user/max_user_namespaces": "90000"}, ROOT_MOUNT, "said so", "troubleshooting"),
    ],
)  # fmt: skip
def test_the_cause_is_found(
    tmp_path: Path, settings: Mapping[str, str], mounts: str, cause: str, remedy: str
) -> None:
    found = refusal_of(
        "said so",
        proc=machine(tmp_path / "proc", settings=settings, mounts=mounts),
        root=tmp_path,
        environ={},
    )
    assert cause in found.cause and remedy in found.remedy
    assert "container" not in found.cause


def test_the_remedy_in_a_container_is_an_option_of_its_start(tmp_path: Path) -> None:
    proc = machine(tmp_path / "proc", settings={"kernel/apparmor_restrict_unprivileged_userns": "1"})
    inside = refusal_of(
        "new namespaces: Operation not permitted",
        proc=proc,
        root=tmp_path,
        environ={"KUBERNETES_SERVICE_HOST": ""},
    )
    assert inside.cause.endswith(
        "container may not create sandboxes: new namespaces: Operation not permitted"
    )
    assert "procMount" in inside.remedy and "--security-opt" not in inside.remedy
    (tmp_path / ".dockerenv").touch()
    docker = refusal_of("mount: permission denied", proc=proc, root=tmp_path, environ={})
    assert "seccomp=unconfined" in docker.remedy and "procMount" not in docker.remedy
    assert "container" not in refusal_of("not implemented", proc=proc, root=tmp_path, environ={}).cause
    (proc / "sys/user").mkdir()
    (proc / "sys/user/max_user_namespaces").write_text("0\n")
    assert "on the container's host" in refusal_of("x", proc=proc, root=tmp_path, environ={}).remedy


def test_settings_for_ordinary_users_do_not_concern_root(tmp_path: Path) -> None:
    settings = {
        "kernel/unprivileged_userns_clone": "0",
        "kernel/apparmor_restrict_unprivileged_userns": "1",
    }
    proc = machine(tmp_path / "proc", settings=settings, capabilities="000001ffffffffff")
    assert refusal_of("said so", proc=proc, root=tmp_path, environ={}).cause == "said so"


def test_a_limit_is_not_called_a_full_device(tmp_path: Path) -> None:
    found = refusal_of("new namespaces: No space left on device", proc=tmp_path, root=tmp_path, environ={})
    assert "device" not in found.cause and "limit of namespaces" in found.cause
    assert "max_user_namespaces" in found.remedy


@pytest.mark.parametrize(
    ("first", "chroot"),
    [
        (ROOT_MOUNT, False),
        (
            "21 1 254:0 / / rw - ext4 /dev/vda rw\n22 21 254:0 /debian /srv/debian rw - ext4 /dev/vda rw\n",
            True,
        ),
        ("41 1 254:0 / / rw - ext4 /dev/vda rw\n", False),  # another mount namespace
    ],
)
def test_a_chroot_at_a_mount_point_is_found(tmp_path: Path, first: str, chroot: bool) -> None:
    proc = machine(tmp_path / "proc", settings={}, first=first)
    found = refusal_of("new namespaces: Operation not permitted", proc=proc, root=tmp_path, environ={})
    assert ("chroot" in found.cause) == chroot


def test_a_guess_of_bubblewrap_is_not_the_cause(tmp_path: Path) -> None:
    said = (
        "No permissions to creating new namespace, likely because the kernel does not allow non-privileged "
        "user namespaces. On e.g. debian this can be enabled with 'sysctl kernel.unprivileged_userns_clone=1'"
    )
    for environ in ({}, {"container": "podman"}):
        proc = machine(tmp_path / str(len(environ)), settings={})
        found = refusal_of(said, proc=proc, root=tmp_path, environ=environ)
        assert found.cause.endswith("the kernel refuses new namespaces") and "sysctl" not in found.remedy


def test_a_limit_that_is_high_is_doubled(tmp_path: Path) -> None:
    proc = machine(tmp_path / "proc", settings={"user/max_user_namespaces": "90000"})
    found = refusal_of("new namespaces: ENOSPC", proc=proc, root=tmp_path, environ={})
    assert found.remedy == "as root: `sysctl user.max_user_namespaces=180000`"


@pytest.mark.parametrize("inner", ["", "unshare -U -r"])  # in the inner one, its parent's limit is reached
@pytest.mark.parametrize("kind", ["mnt", "pid", "net", "ipc", "uts", "cgroup"])
def test_the_limit_that_is_reached_is_named(kind: str, inner: str) -> None:
    script = f'echo 0 > /proc/sys/user/max_{kind}_namespaces; exec {inner} "$0" -I -S "$1"'
    done = subprocess.run(
        ["unshare", "-U", "-r", "sh", "-c", script, sys.executable, user_namespaces.__file__],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and f"`sysctl user.max_{kind}_namespaces=" in done.stderr, done.stderr
    assert f"user.max_{kind}_namespaces{'' if inner else '=0'})" in done.stderr


@pytest.mark.parametrize("limit", [0, 1000])
def test_the_set_up_script_finds_the_cause_without_packages(limit: int) -> None:
    script = f'echo {limit} > /proc/sys/user/max_user_namespaces; exec "$0" -I -S "$1"'
    done = subprocess.run(
        ["unshare", "-U", "-r", "sh", "-c", script, sys.executable, user_namespaces.__file__],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (0 if limit else 1), done.stderr
    assert ("user.max_user_namespaces=0" in done.stderr) == (not limit)
