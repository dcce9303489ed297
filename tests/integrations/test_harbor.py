"""The environment for Harbor, with the unmodified harbor package: its oracle agent, and its interface."""

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.frameworks, pytest.mark.anyio, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)
]  # fmt: skip

TEST = """\
#!/bin/bash
if [ "$(cat /app/out.txt)" = "$WANTED" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
DOCKERFILE = "FROM base:1\nENV GREETING=hello\nWORKDIR /app\nCOPY data.txt .\n"
VERIFIER = '[verifier.env]\nWANTED = "{}"\n'
#: Files of three tasks: a Dockerfile; an image with files beside it; and a verifier in a sandbox of its own.
TASKS = {
    "dockerfile": {
        "task.toml": '[environment]\nnetwork_mode = "no-network"\nmemory_mb = 512\n'
        + VERIFIER.format("hello data"),
        "environment/Dockerfile": DOCKERFILE,
        "environment/data.txt": "data\n",
        "solution/solve.sh": '#!/bin/bash\necho "$GREETING $(cat data.txt)" > out.txt\n',
    },
    "image": {
        "task.toml": '[environment]\ndocker_image = "base:1"\nworkdir = "/app"\nenv = {A = "b"}\n'
        '[environment.healthcheck]\ncommand = "test -d /app"\n' + VERIFIER.format("b local"),
        "environment/local.txt": "local\n",
        "solution/solve.sh": '#!/bin/bash\necho "$A $(cat /app/local.txt)" > /app/out.txt\n',
    },
    "separate": {
        "task.toml": 'artifacts = ["/app/out.txt"]\n[environment]\nnetwork_mode = "allowlist"\n'
        'allowed_hosts = ["*.example.org"]\n[verifier]\nenvironment_mode = "separate"\n'
        '[verifier.environment]\nnetwork_mode = "no-network"\n' + VERIFIER.format("127.0.0.1:3128"),
        "environment/Dockerfile": DOCKERFILE,
        "environment/data.txt": "data\n",
        "tests/Dockerfile": "FROM base:1\nCOPY test.sh /tests/test.sh\n",
        "solution/solve.sh": '#!/bin/bash\necho "${http_proxy#http://}" > /app/out.txt\n',
    },
}  # fmt: skip


def write(folder: Path, files: dict[str, str]) -> Path:
    texts = {"instruction.md": "Write out.txt.\n", "tests/test.sh": TEST, **files}
    for path, text in texts.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(0o755 if text.startswith("#!") else 0o644)
    return folder


def harbor(folder: Path, tasks: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run Harbor's command on tasks; return the results of the trials by task."""
    command = ["run", "--path", str(tasks), "--jobs-dir", str(folder), "--n-concurrent", "2", "--yes"]
    environment = ["--env", "prorl_envs.integrations.harbor:ProrlEnvironment"]
    program = Path(sys.executable).with_name("harbor")
    done = subprocess.run(
        [program, *command, *environment, *arguments],
        capture_output=True, text=True, check=False, cwd=folder, env={**os.environ, "HARBOR_TELEMETRY": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    trials = [json.loads(path.read_text()) for path in folder.glob("*/*/result.json")]
    return sorted(trials, key=lambda trial: str(trial["task_name"]))


def test_the_oracle_solves_tasks(tmp_path: Path) -> None:
    for name, files in TASKS.items():
        write(tmp_path / "tasks" / name, files)
    (tmp_path / "jobs").mkdir()
    trials = harbor(tmp_path / "jobs", tmp_path / "tasks", "--agent", "oracle")
    assert [(trial["exception_info"], trial["verifier_result"]) for trial in trials] == [
        (None, {"rewards": {"reward": 1.0}})
    ] * 3, [trial["exception_info"] for trial in trials]


def test_the_verifier_sees_that_nothing_was_done(tmp_path: Path) -> None:
    write(tmp_path / "tasks" / "dockerfile", TASKS["dockerfile"])
    (tmp_path / "jobs").mkdir()
    [trial] = harbor(tmp_path / "jobs", tmp_path / "tasks", "--agent", "nop")
    assert trial["exception_info"] is None and trial["verifier_result"]["rewards"] == {"reward": 0.0}


type Make = Callable[..., Any]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def make(*, compose: bool = False, **config: Any) -> Any:
        from harbor.models.task.config import EnvironmentConfig
        from harbor.models.trial.paths import TrialPaths

        from prorl_envs.integrations.harbor import ProrlEnvironment

        folder = write(tmp_path / "task", TASKS["dockerfile"]) / "environment"
        if compose:
            (folder / "docker-compose.yaml").write_text("services: {main: {}, db: {image: x}}\n")
        options = config.pop("options", {})
        return ProrlEnvironment(
            folder,
            "task",
            "task__1__env",
            TrialPaths(tmp_path / "trial"),
            EnvironmentConfig(**config),
            **options,
        )

    return make


@pytest.fixture
async def environment(make: Make) -> AsyncIterator[Any]:
    opened = make(network_mode="no-network")
    await opened.start(force_build=False)
    yield opened
    await opened.stop(delete=True)
    await opened.stop(delete=True)


async def test_commands(environment: Any) -> None:
    done = await environment.exec("echo $0 $A $GREETING; pwd; whoami; echo err >&2; exit 3", env={"A": "1"})
    assert (done.stdout, done.stderr, done.return_code) == ("bash 1 hello\n/app\nroot\n", "err\n", 3)
    assert (await environment.exec("pwd; kill -9 $$", cwd="/etc")).model_dump() == {
        "stdout": "/etc\n", "stderr": "", "return_code": 137
    }  # fmt: skip
    with pytest.raises(RuntimeError, match="timed out after 1 seconds"):
        await environment.exec("sleep 60", timeout_sec=1)
    with pytest.raises(ValueError, match="only user, not as 'nobody'"):
        await environment.exec("true", user="nobody")
    with environment.with_default_user("root"), environment.scoped_exec_env({"A": "scoped"}):
        assert (await environment.exec("echo $A", env={"A": "1"})).stdout == "scoped\n"
    await environment.exec("sleep 60 & echo $! > /pid")  # background processes continue
    assert (await environment.exec("kill -0 $(cat /pid)")).return_code == 0


async def test_transfers(environment: Any, tmp_path: Path) -> None:
    tree = write(tmp_path / "tree", {"a/b": "x", "run": "#!/bin/sh\n"})
    await environment.upload_dir(tree, "/deep/tree")
    await environment.upload_file(tree / "a/b", "/other/b")
    assert (await environment.exec("cat /deep/tree/a/b /other/b; test -x /deep/tree/run")).stdout == "xx"
    assert await environment.is_dir("/deep/tree") and await environment.is_file("/other/b")
    await environment.exec("mkfifo /deep/tree/pipe || rm -f /deep/tree/pipe; echo new > /deep/tree/a/b")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/kept").write_text("kept")
    await environment.download_dir("/deep/tree", tmp_path / "out")
    await environment.download_file("/other/b", tmp_path / "new/b")
    read = [(tmp_path / path).read_text() for path in ("out/a/b", "out/kept", "new/b")]
    assert read == ["new\n", "kept", "x"] and os.access(tmp_path / "out/run", os.X_OK)
    with pytest.raises(FileNotFoundError):
        await environment.download_file("/missing", tmp_path / "missing")
    await environment.download_dir_with_exclusions(
        source_dir="/deep/tree", target_dir=tmp_path / "part", exclude=["run"]
    )
    assert (tmp_path / "part/a/b").exists() and not (tmp_path / "part/run").exists()


async def test_networks(make: Make) -> None:
    from harbor.models.task.config import NetworkPolicy

    for mode, options, proxied in (
        ("no-network", {"public_network": ["a.org"]}, False),
        ("public", {}, False),
        ("public", {"public_network": ["a.org"]}, True),
    ):
        opened = make(options={"network_policy": NetworkPolicy(network_mode=mode), **options})
        await opened.start(force_build=False)
        assert bool((await opened.exec("echo -n $https_proxy; cat /proc/net/route")).stdout) is not None
        assert ("3128" in (await opened.exec("echo $https_proxy")).stdout) is proxied
        assert (await opened.exec("cat < /dev/tcp/1.1.1.1/80", timeout_sec=5)).return_code == 1
        await opened.stop(delete=True)


async def test_impossible_tasks_are_refused_before_the_start(make: Make) -> None:
    from harbor.environments.base import SandboxBuildFailedError
    from harbor.models.task.config import NetworkPolicy

    with pytest.raises(RuntimeError, match="GPU"):
        make(gpus=1)
    with pytest.raises(RuntimeError, match="Windows"):
        make(os="windows")
    with pytest.raises(ValueError, match="mounts no directories"):
        make(options={"mounts": [{"type": "bind", "source": "/srv", "target": "/srv"}]})
    with pytest.raises(ValueError, match="CIDR"):
        make(
            options={"network_policy": NetworkPolicy(network_mode="allowlist", allowed_hosts=["10.0.0.0/8"])}
        )
    with pytest.raises(ValueError, match="Unknown option 'public'"):
        make(options={"public": True})
    wrong = make()
    (wrong.environment_dir / "Dockerfile").write_text("FROM base:1\nRUN exit 7\n")
    with pytest.raises(SandboxBuildFailedError, match="7"):
        await wrong.start(force_build=False)
    with pytest.raises(ValueError, match="Compose services"):
        make(compose=True)


def test_nothing_remains_of_a_process(remains: Callable[[str], None], tmp_path: Path) -> None:
    write(tmp_path / "task", TASKS["dockerfile"])
    remains("""\
import asyncio, pathlib
from harbor.models.task.config import EnvironmentConfig as Config
from harbor.models.trial.paths import TrialPaths
from prorl_envs.integrations.harbor import ProrlEnvironment

async def main():
    here = pathlib.Path()
    opened = ProrlEnvironment(here / "task/environment", "t", "s", TrialPaths(here / "trial"), Config())
    await opened.start(False)
    await opened.exec("sleep 98765 & true")
    print("ready", flush=True)
    input()
    await opened.stop(True)

asyncio.run(main())
""")
