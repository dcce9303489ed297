"""The apptainer-instance driver: tool servers inside, the first process, and the limits of Apptainer.

`test_on_a_machine_without_user_namespaces` has a setuid Apptainer; the others use this machine's.
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
from prorl_envs.sandbox.base import Mount, SandboxLimits, SandboxSpec
from prorl_envs.sandbox.drivers.apptainer_probe import find_apptainer
from prorl_envs.sandbox.drivers.apptainer_wrapper import explain_wrapper
from prorl_envs.sandbox.drivers.instance.command import InstanceFiles, apptainer_command, explain_instance
from prorl_envs.sandbox.drivers.instance.driver import InstanceDriver, InstanceSandbox, shows_python
from prorl_envs.sandbox.drivers.instance.probe import instance_check
from prorl_envs.sandbox.filesystem.python_runtime import python_runtime
from prorl_envs.tools.client.connection import ToolLimits
from prorl_envs.tools.client.python import PythonEngine
from prorl_envs.tools.client.toolbox import Toolbox
from tests.sandbox import setuid_machine
from tests.sandbox.rootfs import build_sif, missing_for_sif, write_busybox_rootfs, write_rootfs
from tests.support.sandbox_entry import RUN_SCRIPTS, SCRIPT_TEMPLATES, ask, run_script

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.thorough,
    pytest.mark.skipif(
        not (shutil.which("apptainer") or shutil.which("singularity")),
        reason="neither Apptainer nor Singularity is installed",
    ),
]

#: Promises that are quick to test and differ if tool servers are inside.
SHORT = "START-00,START-017,END-00,PROC,FS-00,FS-01,ENV-00,NET,PRIV,KERN,SRV,LIM-004,LIM-005,PY-01"


@pytest.fixture(scope="module")
async def driver(run_dir: Path) -> AsyncIterator[InstanceDriver]:
    """Driver with the tools. The shared files of its sandboxes are prepared at setup."""
    driver = InstanceDriver()
    try:
        await driver.warm()
        yield driver
    finally:
        await driver.aclose()


@pytest.fixture
async def scripted(run_dir: Path) -> AsyncIterator[InstanceDriver]:
    """Driver for a single test, which may break it."""
    driver = InstanceDriver(templates=SCRIPT_TEMPLATES)
    yield driver
    await driver.aclose()


async def open_tools(sandbox: InstanceSandbox, *, margin_s: float = 15.0) -> Toolbox:
    return await Toolbox.open(sandbox, limits=ToolLimits(grace_s=0.3, margin_s=margin_s))


async def test_an_image_needs_no_python(scripted: InstanceDriver, tmp_path: Path) -> None:
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


async def test_an_images_variables_do_not_reach_the_first_process(
    scripted: InstanceDriver, tmp_path: Path
) -> None:
    root = write_rootfs(tmp_path / "root")
    (root / ".singularity.d" / "env").mkdir(parents=True)
    (root / ".singularity.d" / "env" / "90-environment.sh").write_text("exit 7\n")
    (root / "etc" / "ld.so.preload").write_text("/no/such/library.so\n")
    sandbox = await scripted.start(SandboxSpec(image=root))
    assert await run_script(sandbox, "cat /etc/ld.so.preload; ls -A /.singularity.d; echo on") == "on\n"
    assert (root / "etc" / "ld.so.preload").read_text() == "/no/such/library.so\n"


INOTIFY_INSTANCES = int(Path("/proc/sys/user/max_inotify_instances").read_text())
#: Prints the limits on shared kernel resources in a sandbox, and whether its devices are read-only.
SHARED = """\
import ctypes, os
c = ctypes.CDLL(None)
terminals = []
try:
    while len(terminals) < 200:
        terminals.append(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))
except OSError:
    pass
instances = next(n for n in range(4096) if c.inotify_init1(0) < 0)
queues = next((n for n in range(300) if c.msgget(0, 0o1600) < 0), 300)
print(len(terminals), instances, queues, os.statvfs("/dev/null").f_flag & 1)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can limit what Apptainer has mounted")
async def test_as_root_a_sandbox_has_limits_on_shared_kernel_resources(driver: InstanceDriver) -> None:
    mounts, masks, env = python_runtime()
    sandbox = await driver.start(SandboxSpec(mounts=mounts, masks=masks, env=env))
    tools = await open_tools(sandbox)
    try:
        done = await tools.run([sys.executable, "-I", "-c", SHARED], timeout_s=30)
        assert list(map(int, done.output.split())) == [64, INOTIFY_INSTANCES // 8, 16, 1]
    finally:
        await tools.aclose()
        await sandbox.close()


async def test_a_tool_server_killed_from_inside_is_replaced_and_reported(driver: InstanceDriver) -> None:
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


async def test_a_tool_server_stopped_from_inside_is_replaced(driver: InstanceDriver) -> None:
    sandbox = await driver.start(SandboxSpec())
    tools = await open_tools(sandbox, margin_s=1.0)
    try:
        stopped = await tools.bash("kill -STOP $PPID; sleep 20", timeout_s=1)
        assert not stopped.ok and "tool server" in stopped.text
        assert (await tools.bash("echo on", timeout_s=20)).text == "on\n"
    finally:
        await tools.aclose()
        await sandbox.close()


async def test_killing_all_processes_spares_the_tool_servers(driver: InstanceDriver) -> None:
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
            alive = [state for state in states if state != b"Z"]  # killed processes may still be zombies
            assert 2 <= len(alive) <= 2 + len(servers), done.output  # the first process, and this one
    finally:
        await asyncio.gather(one.aclose(), two.aclose())
        await sandbox.close()


@pytest.mark.parametrize("place", ["/run", "/dev/shm"])
async def test_files_in_memory_count_towards_the_memory_limit(driver: InstanceDriver, place: str) -> None:
    """The writing process is killed, or the sandbox if the kill frees no memory.

    The limit is below the 64 MB that Apptainer gives an ordinary user's `/run` ("sessiondir max size").
    """
    sandbox = await driver.start(SandboxSpec(limits=SandboxLimits(memory_bytes=48 << 20)))
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


async def test_an_unreadable_directory_counts_towards_the_disk(driver: InstanceDriver) -> None:
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
    """Write a program that runs Apptainer with changed options, like the settings of a site. `case` is the
    body of bash's `case $word in` for each word of the command; other words are unchanged."""
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
async def test_a_site_without_a_namespace_is_detected(
    run_dir: Path, tmp_path: Path, left_out: str, setting: str
) -> None:
    """Apptainer would only print a warning, and in this test it prints none."""
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


async def test_a_site_that_hides_processes_is_detected(tmp_path: Path) -> None:
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
        with pytest.raises(SandboxError, match="needs that Python") as caught:
            await Toolbox.open(sandbox, python=PythonEngine.FORKED)
        assert "python_runtime" in caught.value.hint
    finally:
        await sandbox.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root can add one")
async def test_a_default_route_is_refused_with_a_reason(scripted: InstanceDriver) -> None:
    with pytest.raises(SandboxError, match="default route"):
        await scripted.start(SandboxSpec(default_route=True))


async def test_the_visible_part_of_this_package_holds_no_task(driver: InstanceDriver) -> None:
    runtime = (await driver.shared()).runtime
    folders = {path.name for path in (runtime.path / "code" / "prorl_envs").iterdir() if path.is_dir()}
    assert folders <= {"sandbox", "tools", "__pycache__"}
    assert not list(runtime.path.rglob("*-packages"))


async def test_the_first_process_exits_only_when_the_socket_closes(scripted: InstanceDriver) -> None:
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


def test_mounts_below_a_mount_are_read_only_too() -> None:
    spec = SandboxSpec(mounts=(Mount(source=Path("/data"), target="/in"),))
    found = mounts_of(spec, ("/data/scratch", "/usr/local", "/database", "/data"))
    assert "type=bind,source=/data/scratch,destination=/in/scratch,ro" in found
    assert "type=bind,source=/usr/local,destination=/usr/local,ro" in found
    assert not any("/database" in mount for mount in found)


def test_directories_above_a_mask_cannot_be_moved() -> None:
    spec = SandboxSpec(masks=("/workspace/a/b/secret",))
    found = mounts_of(spec)
    places = [mount.partition("destination=")[2] for mount in found]
    assert places[-3:] == ["/workspace/a", "/workspace/a/b", "/workspace/a/b/secret,ro"]


def test_paths_with_commas_and_quotes_are_passed_as_one_mount() -> None:
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


def test_apptainers_messages_are_shown_without_colours() -> None:
    said = "\x1b[91mERROR : Failed to create user namespace\x1b[0m"
    for error in (explain_instance(said), explain_wrapper(said)):
        assert error.message.endswith("the sandbox: ERROR : Failed to create user namespace")


def test_this_machines_apptainer_can_start_a_sandbox(run_dir: Path) -> None:
    check = instance_check(run_dir)
    assert check.ok, check


def test_an_unusable_apptainer_is_reported_with_a_remedy(run_dir: Path, tmp_path: Path) -> None:
    program = tmp_path / "apptainer"
    program.write_text("#!/bin/sh\necho 'FATAL: not allowed by configuration' >&2; exit 255\n")
    program.chmod(0o755)
    check = instance_check(run_dir, program)
    assert not check.ok
    assert "allow user ns = yes" in check.remedy


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_on_a_machine_without_user_namespaces() -> None:
    """A real setuid Apptainer, as an ordinary user who may make no user namespaces."""
    if reason := setuid_machine.missing():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="prs-") as run_dir:
        shutil.chown(run_dir, setuid_machine.USER)
        program = (
            "from prorl_envs.sandbox.drivers.select import choose_driver\n"
            "from prorl_envs.cli.main import app\n"
            "import sys\n"
            "name = choose_driver('auto')\n"
            "print('chosen:', name)\n"
            f"sys.argv = ['prorl-envs', 'conformance', '--driver', name, '--only', '{SHORT}']\n"
            "app()\n"
        )
        done = subprocess.run(
            [sys.executable, "-m", "tests.sandbox.setuid_machine", sys.executable, "-c", program],
            cwd=Path(__file__).parent.parent.parent.parent,
            env={**os.environ, "PRORL_RUN_DIR": run_dir, "TMPDIR": run_dir, "HOME": run_dir},
            capture_output=True,
            text=True,
            check=False,
        )
    assert "chosen: apptainer-instance" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr
