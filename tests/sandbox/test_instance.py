"""What is the instance driver's own: tool servers inside, the first process, what Apptainer does not give.

`test_on_a_machine_without_user_namespaces` has a setuid Apptainer; the others use what this machine has.
"""

import asyncio
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prorl_envs.errors import SandboxError, SandboxLimit
from prorl_envs.sandbox.apptainer_probe import find_apptainer
from prorl_envs.sandbox.base import Limits, Mount, SandboxSpec
from prorl_envs.sandbox.doorway import explain_doorway
from prorl_envs.sandbox.instance import InstanceDriver, InstanceSandbox, shows_python
from prorl_envs.sandbox.instance_command import InstanceFiles, apptainer_command, explain_instance
from prorl_envs.sandbox.instance_probe import instance_check
from prorl_envs.sandbox.runtime import python_runtime
from prorl_envs.testing.sandbox_entry import RUN_SCRIPTS, SCRIPT_TEMPLATES, ask, run_script
from prorl_envs.tools.client import Toolbox
from prorl_envs.tools.link import ToolLimits
from tests.sandbox import setuid_machine
from tests.sandbox.rootfs import build_sif, missing_for_sif, write_busybox_rootfs, write_rootfs

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(
        not (shutil.which("apptainer") or shutil.which("singularity")),
        reason="neither Apptainer nor Singularity is installed",
    ),
]

#: Promises that are short to try and differ where tool servers are inside.
SHORT = "START-00,START-017,END-00,PROC,FS-00,FS-01,ENV-00,NET,PRIV,SRV,SNAP-001,LIM-004,LIM-005,PY-01"


@pytest.fixture(scope="module")
async def driver(run_dir: Path) -> AsyncIterator[InstanceDriver]:
    """A driver with the tools; what its sandboxes share is gathered."""
    driver = InstanceDriver()
    try:
        await driver.warm()
        yield driver
    finally:
        await driver.aclose()


@pytest.fixture
async def scripted(run_dir: Path) -> AsyncIterator[InstanceDriver]:
    """A driver of the test's own, to be broken."""
    driver = InstanceDriver(templates=SCRIPT_TEMPLATES)
    yield driver
    await driver.aclose()


async def open_tools(sandbox: InstanceSandbox, *, margin_s: float = 15.0) -> Toolbox:
    return await Toolbox.open(sandbox, limits=ToolLimits(grace_s=0.3, margin_s=margin_s))


async def test_an_image_without_python_needs_none(scripted: InstanceDriver, tmp_path: Path) -> None:
    root = write_rootfs(tmp_path / "root")
    busybox = shutil.which("busybox")
    images = [root]
    if busybox is not None:
        images.append(write_busybox_rootfs(tmp_path / "small", busybox))
    if not missing_for_sif():
        images.append(build_sif(root, tmp_path / "image.sif"))
    for image in images:
        sandbox = await scripted.start(SandboxSpec(image=image))
        assert await run_script(sandbox, "cat /etc/image; pwd") == "from the image\n/workspace\n"
        await sandbox.close()


async def test_what_an_image_sets_does_not_reach_the_first_process(
    scripted: InstanceDriver, tmp_path: Path
) -> None:
    root = write_rootfs(tmp_path / "root")
    (root / ".singularity.d" / "env").mkdir(parents=True)
    (root / ".singularity.d" / "env" / "90-environment.sh").write_text("exit 7\n")
    (root / "etc" / "ld.so.preload").write_text("/no/such/library.so\n")
    sandbox = await scripted.start(SandboxSpec(image=root))
    assert await run_script(sandbox, "cat /etc/ld.so.preload; ls -A /.singularity.d; echo on") == "on\n"
    assert (root / "etc" / "ld.so.preload").read_text() == "/no/such/library.so\n"


async def test_a_tool_server_killed_from_inside_is_replaced_and_the_model_told(
    driver: InstanceDriver,
) -> None:
    sandbox = await driver.start(SandboxSpec())
    tools = await open_tools(sandbox)
    try:
        await tools.bash("echo kept > file; x=1", timeout_s=20)
        killed = await tools.bash("kill -9 $PPID; sleep 20", timeout_s=20)
        assert not killed.ok and "the tool server ended" in killed.text
        after = await tools.bash("cat file; echo x=$x", timeout_s=20)
        assert after.text == "kept\nx=\n"
    finally:
        await tools.aclose()
        await sandbox.close()


async def test_a_tool_server_stopped_from_inside_is_given_up_and_replaced(driver: InstanceDriver) -> None:
    sandbox = await driver.start(SandboxSpec())
    tools = await open_tools(sandbox, margin_s=1.0)
    try:
        stopped = await tools.bash("kill -STOP $PPID; sleep 20", timeout_s=1)
        assert not stopped.ok and "tool server" in stopped.text
        assert (await tools.bash("echo on", timeout_s=20)).text == "on\n"
    finally:
        await tools.aclose()
        await sandbox.close()


async def test_ending_all_processes_spares_the_tool_servers(driver: InstanceDriver) -> None:
    sandbox = await driver.start(SandboxSpec())
    one, two = await open_tools(sandbox), await open_tools(sandbox)
    try:
        await one.bash(":", timeout_s=20)
        await two.bash("setsid sleep 600 & while :; do (sleep 0.01); done &", timeout_s=20)
        servers = sandbox.tool_servers
        await one.end_processes()
        assert sandbox.tool_servers == servers
        for tools in (one, two):
            done = await tools.run(["/bin/sh", "-c", "exec cat /proc/[0-9]*/stat 2>/dev/null"], timeout_s=20)
            states = [line.rpartition(b") ")[2][:1] for line in done.output.splitlines()]
            alive = [state for state in states if state != b"Z"]  # who is dead may wait to be collected
            assert 2 <= len(alive) <= 2 + len(servers), done.output  # the first, and this one
    finally:
        await asyncio.gather(one.aclose(), two.aclose())
        await sandbox.close()


@pytest.mark.parametrize("place", ["/run", "/dev/shm"])
async def test_files_in_memory_end_with_the_memory_limit(driver: InstanceDriver, place: str) -> None:
    """What writes them is killed, or the sandbox is ended where that is no help.

    The limit is below the 64 MB that Apptainer gives an ordinary user's `/run` ("sessiondir max size").
    """
    sandbox = await driver.start(SandboxSpec(limits=Limits(memory_bytes=48 << 20)))
    tools = await open_tools(sandbox)
    try:
        try:
            said = (
                await tools.bash(f"head -c 900000000 /dev/zero > {place}/much; sleep 1", timeout_s=60)
            ).text
        except SandboxLimit as ended:
            said = str(ended)
        assert "memory limit of 48 MB was" in said
    finally:
        await tools.aclose()
        await sandbox.close()


async def test_a_directory_closed_to_its_user_counts_towards_the_disk(driver: InstanceDriver) -> None:
    sandbox = await driver.start(SandboxSpec())
    tools = await open_tools(sandbox)
    try:
        await tools.bash("mkdir shut; head -c 3000000 /dev/zero > shut/much; chmod 0 shut", timeout_s=20)
        use = await sandbox.measure_disk(size=1 << 40, files=1 << 20)
        assert use.size >= 3_000_000
        assert (sandbox.workspace / "shut").stat().st_mode & 0o777 == 0
    finally:
        await tools.aclose()
        await sandbox.close()


def site(folder: Path, case: str) -> Path:
    """A program that runs Apptainer as a site's settings would have it: each word of its command goes through
    this case of bash's `case $word in`, or stays as it is."""
    program = folder / "apptainer"
    program.write_text(
        "#!/bin/bash\nwords=()\nfor word; do case $word in "
        f'{case} *) words+=("$word");; esac; done\nexec {find_apptainer()} "${{words[@]}}"\n'
    )
    program.chmod(0o755)
    return program


@pytest.mark.parametrize(
    ("left_out", "setting"), [("--pid", "allow pid ns"), ("--ipc", "allow ipc ns"), ("--uts", "allow uts ns")]
)
async def test_a_site_that_gives_no_namespace_is_found_out(
    run_dir: Path, tmp_path: Path, left_out: str, setting: str
) -> None:
    """Apptainer only warns, and here not even that."""
    leave = f'"{left_out}"' + ("|--hostname|sandbox" if left_out == "--uts" else "")
    program = site(tmp_path, f"{leave}) ;;")
    driver = InstanceDriver(templates=SCRIPT_TEMPLATES, apptainer=program)
    try:
        with pytest.raises(SandboxError, match="no namespace of its own") as caught:
            await driver.start(SandboxSpec())
        assert setting in caught.value.hint
        if left_out == "--pid":
            check = instance_check(run_dir, program)
            assert not check.ok and setting in check.remedy
    finally:
        await driver.aclose()


async def test_a_site_that_shows_no_processes_is_found_out(tmp_path: Path) -> None:
    program = site(tmp_path, "exec) words+=(exec --no-mount proc);;")
    driver = InstanceDriver(templates=SCRIPT_TEMPLATES, apptainer=program)
    try:
        with pytest.raises(SandboxError, match="No such file or directory: '/proc/self") as caught:
            await driver.start(SandboxSpec())
        assert "mount proc = yes" in caught.value.hint
        assert "Traceback" not in caught.value.message
    finally:
        await driver.aclose()


async def test_a_python_session_without_the_hosts_python_is_refused(driver: InstanceDriver) -> None:
    mounts, masks, env = python_runtime()
    assert shows_python(SandboxSpec(mounts=mounts, masks=masks, env=env))
    sandbox = await driver.start(SandboxSpec())
    try:
        with pytest.raises(SandboxError, match="needs the host's Python") as caught:
            await Toolbox.open(sandbox, python=True)
        assert "python_runtime" in caught.value.hint
    finally:
        await sandbox.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root can add one")
async def test_a_default_route_is_refused_with_the_reason(scripted: InstanceDriver) -> None:
    with pytest.raises(SandboxError, match="default route"):
        await scripted.start(SandboxSpec(default_route=True))


async def test_what_is_shown_of_this_package_holds_no_task(driver: InstanceDriver) -> None:
    runtime = (await driver.ready()).runtime
    folders = {path.name for path in (runtime.path / "code" / "prorl_envs").iterdir() if path.is_dir()}
    assert folders <= {"sandbox", "tools", "__pycache__"}
    assert not list(runtime.path.rglob("*-packages"))


async def test_the_first_process_ends_with_the_socket_alone(scripted: InstanceDriver) -> None:
    sandbox = await scripted.start(SandboxSpec())
    with await sandbox.spawn(RUN_SCRIPTS) as sock:
        assert await ask(sock, "kill -9 1; kill -STOP 1; kill -INT 1; kill -CHLD 1; echo on") == "on\n"
        assert await ask(sock, "cat /proc/1/environ /proc/1/maps 2>&1 | head -1") != ""
    assert sandbox.alive
    assert await run_script(sandbox, "echo on") == "on\n"


def files(root: Path) -> InstanceFiles:
    return InstanceFiles(
        root, root / "etc", runtime=root / "runtime", empty=root / "empty", blank=root / "blank"
    )


def mounts_of(spec: SandboxSpec, host_mounts: tuple[str, ...] = ()) -> list[str]:
    command = apptainer_command(
        Path("/bin/apptainer"), spec, files(Path("/d")), setuid=True, host_mounts=host_mounts
    )
    return [word for before, word in itertools.pairwise(command) if before == "--mount"]


def test_what_is_mounted_below_a_mount_is_read_only_too() -> None:
    spec = SandboxSpec(mounts=(Mount(source=Path("/data"), target="/in"),))
    found = mounts_of(spec, ("/data/scratch", "/usr/local", "/database", "/data"))
    assert "type=bind,source=/data/scratch,destination=/in/scratch,ro" in found
    assert "type=bind,source=/usr/local,destination=/usr/local,ro" in found
    assert not any("/database" in mount for mount in found)


def test_what_lies_above_a_mask_cannot_be_moved() -> None:
    spec = SandboxSpec(masks=("/workspace/a/b/secret",))
    found = mounts_of(spec)
    places = [mount.partition("destination=")[2] for mount in found]
    assert places[-3:] == ["/workspace/a", "/workspace/a/b", "/workspace/a/b/secret,ro"]


def test_paths_with_commas_and_quotes_stay_one_mount() -> None:
    spec = SandboxSpec(mounts=(Mount(source=Path('/odd,"path'), target="/in"),))
    assert 'type=bind,"source=/odd,""path",destination=/in,ro' in mounts_of(spec)


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("FATAL: configuration disallows users from running sandbox containers", "allow container dir = yes"),
        ("configuration disallows users from running unencrypted SIF containers", "container sif = yes"),
        ("FATAL: apptainer image is not in an allowed configured path", "limit container paths"),
        ("FATAL: apptainer image is not owned by required user(s)", "limit container owners"),
        ("FATAL: apptainer image is not owned by required group(s)", "limit container groups"),
        ("1 /bin/sh: 1: cannot open /proc/net/dev: No such file", "mount proc = yes"),
        ("ERROR: Failed to create user namespace: maximum number exceeded", "allow setuid = yes"),
        ("Error: unknown flag: --no-eval", "1.2 or later"),
        ("", "doctor"),
    ],
)  # fmt: skip
def test_each_refusal_has_its_remedy(said: str, hint: str) -> None:
    assert hint in explain_instance(said).hint


def test_what_apptainer_says_is_shown_without_its_colours() -> None:
    said = "\x1b[91mERROR : Failed to create user namespace\x1b[0m"
    for error in (explain_instance(said), explain_doorway(said)):
        assert error.message.endswith("the sandbox: ERROR : Failed to create user namespace")


def test_this_machines_apptainer_can_be_a_sandbox(run_dir: Path) -> None:
    check = instance_check(run_dir)
    assert check.ok, check


def test_an_apptainer_that_cannot_is_told_with_the_remedy(run_dir: Path, tmp_path: Path) -> None:
    program = tmp_path / "apptainer"
    program.write_text("#!/bin/sh\necho 'FATAL: not allowed by configuration' >&2; exit 255\n")
    program.chmod(0o755)
    check = instance_check(run_dir, program)
    assert not check.ok
    assert "allow user ns = yes" in check.remedy


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_on_a_machine_without_user_namespaces() -> None:
    """A real setuid Apptainer, as an ordinary user to whom the kernel gives no user namespace."""
    if reason := setuid_machine.missing():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="prs-") as run_dir:
        shutil.chown(run_dir, setuid_machine.USER)
        program = (
            "from prorl_envs.sandbox.choice import choose_driver\n"
            "from prorl_envs.cli.main import app\n"
            "import sys\n"
            "name = choose_driver('auto')\n"
            "print('chosen:', name)\n"
            f"sys.argv = ['prorl-envs', 'conformance', '--driver', name, '--only', '{SHORT}']\n"
            "app()\n"
        )
        done = subprocess.run(
            [sys.executable, "-m", "tests.sandbox.setuid_machine", sys.executable, "-c", program],
            cwd=Path(__file__).parent.parent.parent,
            env={**os.environ, "PRORL_RUN_DIR": run_dir, "TMPDIR": run_dir, "HOME": run_dir},
            capture_output=True,
            text=True,
            check=False,
        )
    assert "chosen: instance" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
