"""NeMo Gym's command line with our environments, for tests."""

import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from prorl_envs.nemo.examples import read_jsonl
from prorl_envs.nemo.root import GymRoot, gym_root
from prorl_envs.nemo.rows import server_name
from tests.nemo.conftest import SERVICE_TOKEN, free_port
from tests.packages import install

CHECKOUT = Path(__file__).resolve().parents[2]
SCAFFOLD = CHECKOUT / "prorl_envs" / "cli" / "scaffold"
SITE = Path(sysconfig.get_path("purelib"))
GYM = Path(sys.executable).with_name("gym")
#: Set by scripts/nemo-examples.sh: the example files are rewritten, not compared.
RECORDING = bool(os.environ.get("RECORD_EXAMPLES"))
#: 0.7 has environment servers and schemas of tasks.
HAS_ENVIRONMENT_SERVERS = (SITE / "environment_servers" / "single_agent_turn_legacy").is_dir()
#: 0.7 has manifests and commands for them.
HAS_MANIFESTS = (SITE / "nemo_gym" / "environment" / "manifest.py").is_file()


def prepared_root(path: Path, packages: Sequence[Path] = ()) -> GymRoot:
    """Make a root with these packages of environments installed into it."""
    if packages:
        install(path, *packages)
    return gym_root(path)


def gym(root: GymRoot, *arguments: str, within: str = ".") -> subprocess.CompletedProcess[str]:
    """Run `gym` in the root, or in a folder of it."""
    return subprocess.run(
        [str(GYM), *arguments],
        cwd=root.path / within,
        env=environment(root),
        capture_output=True,
        text=True,
        check=False,
    )


def environment(root: GymRoot) -> Mapping[str, str]:
    """Return the environment of NeMo Gym's processes. Ray's sockets need a short path of their own."""
    # NeMo Gym calls uv, which has to find the running interpreter.
    programs = [str(GYM.parent), str(Path(sys.base_prefix) / "bin"), os.environ["PATH"]]
    own = {
        "PYTHONUNBUFFERED": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TMPDIR": str(root.path / "r"),
        "PRORL_SERVER__TOKEN": SERVICE_TOKEN,
        "PYTHONPATH": str(root.path),
        "PATH": os.pathsep.join(programs),
        "NEMO_GYM_EXTRA_ROOTS": str(root.path),
    }
    return os.environ | own


def server_folder(root: GymRoot, name: str) -> Path:
    """Return the folder of a family's server, where its package is installed."""
    below = Path("resources_servers") / server_name(name)
    local = root.path / below
    return local if (local / "app.py").is_file() else SITE / below


@dataclass(frozen=True)
class Gym:
    """A running NeMo Gym.

    Args:
        root: its folder and its flags.
        flags: options with which another `gym` finds it.
    """

    root: GymRoot
    flags: tuple[str, ...]


def session_members(session: int) -> list[str]:
    """Return the living processes of a session: NeMo Gym, its servers and Ray."""
    members = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = status.read_text().rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, _, _, owner = rest.split()[:4]
        if int(owner) == session and state != "Z":
            members.append(name + ")")
    return members


@contextmanager
def started(root: GymRoot, log: IO[str], *arguments: str) -> Iterator[Gym]:
    """Run `gym env start` in its own session until the block ends, then interrupt it like Ctrl-C."""
    head = ("++head_server.host=127.0.0.1", f"++head_server.port={free_port()}")
    command = [str(GYM), "env", "start", *arguments, *root.flags, *head]
    process = subprocess.Popen(
        command,
        cwd=root.path,
        env=environment(root),
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        wait_until_ready(process, Path(log.name))
        yield Gym(root, head)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(120)
            left = wait_until_gone(process.pid)
        finally:
            # Processes still in the session after an orderly stop are a leak; they must not outlive the test.
            for member in session_members(process.pid):
                os.kill(int(member.split()[0]), signal.SIGKILL)
            process.wait()
    assert not left, f"left behind: {left}"


def wait_until_ready(process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + 600
    while "servers ready!" not in log.read_text():
        assert process.poll() is None, f"gym env start ended:\n{log.read_text()[-5000:]}"
        assert time.monotonic() < deadline, f"not ready:\n{log.read_text()[-5000:]}"
        time.sleep(0.2)


def wait_until_gone(session: int) -> list[str]:
    deadline = time.monotonic() + 20
    while (left := session_members(session)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def model_flags(url: str) -> list[str]:
    return ["--model", "reference", "--model-url", url, "--model-api-key", "none"]


def evaluate(running: Gym, agent: str, rows: list[dict[str, Any]], output: Path) -> list[dict[str, Any]]:
    """Run `gym eval run` on `rows`; return the rollouts in `output`."""
    chosen = output.with_name("rows.jsonl")
    chosen.write_text(
        "".join(
            json.dumps(row | {"agent_ref": {"type": "responses_api_agents", "name": agent}}) + "\n"
            for row in rows
        )
    )
    return collect(running, chosen, output, "--agent", agent)


def collect(running: Gym, chosen: Path, output: Path, *flags: str) -> list[dict[str, Any]]:
    """Run `gym eval run` on the rows in a file; return the rollouts in `output`."""
    flags = ("--input", str(chosen), "--output", str(output), "--concurrency", "4", *flags)
    done = gym(running.root, "eval", "run", "--no-serve", *flags, *running.flags)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return read_jsonl(output)


def config(root: GymRoot, name: str, flavour: str) -> Path:
    return server_folder(root, name) / "configs" / f"{flavour}.yaml"
