"""Run the tests that `make test` does not run, in parts: `make test-full`.

The parts run one after the other. Each has a time limit and a log; a failing part does not stop the others.
After each part the script writes the results as a table (results.md) and as JSON (results.json).
"""

import argparse
import dataclasses
import datetime
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: Seconds between the termination signal at the time limit and the kill of a part's processes.
GRACE_S = 30

_SUMMARY = re.compile(r"^=+ .*\bin \d+\.\d+s.*=+$", re.MULTILINE)
_COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped|rerun)\b")
#: The line of conftest.py before the failure of a test that ran again.
_RERUN = re.compile(r"^_+ ran again: (.+) \(\w+\) _+$", re.MULTILINE)
_SKIP = re.compile(r"^SKIPPED \[(\d+)\] \S+ (.*)$", re.MULTILINE)

#: Parts for the thorough tests of some directories. The part "rest" runs the tests of all other directories.
_APART = {
    "drivers": "tests/sandbox tests/tools tests/env tests/attacks",
    "conformance": "tests/conformance",
    "images": "tests/images envs",
    "service": "tests/rollout tests/model",
    "pages": "tests/viewer",
}

#: Commands of the part "ordinary user", without the sabotages, because the run as root includes them.
_AS_USER = (
    "TESTS_ON_DISK=1 make test\n"
    "make test-thorough ARGS='tests/sandbox tests/tools tests/env tests/attacks tests/conformance "
    '-k "not sabotage"\''
)


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of the run.

    Attributes:
        command: shell command in the repository's root; `$scratch` is a temporary directory of this run.
        limit_s: time limit in seconds.
        default: whether the part runs if no part is named.
        pytest: whether the part runs tests; it then fails if no test passes.
    """

    command: str
    limit_s: int
    default: bool = True
    pytest: bool = True


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a part, a row of the table. The counts are None for a part without tests.

    Attributes:
        tree: git's id of the tested files, or "" if there were uncommitted changes.
        skips: reasons of skipped tests, and the number of tests for each.
        reruns: tests that ran again, each as often as it did.
    """

    part: str
    command: str
    result: str
    passed: int | None
    failed: int | None
    rerun: int | None
    skipped: int | None
    duration_s: int
    date: str
    tree: str
    skips: dict[str, int]
    reruns: list[str]


def thorough(paths: str) -> Part:
    return Part(f"make test-thorough ARGS='{paths}'", 3600)


def on_python(version: str) -> Part:
    """Return the part for `make test` on another Python: this machine's, or Debian's if there is none."""
    command = f"""set -e
        python=$(scripts/find-python.sh {version} .build/python-{version})
        SETUP_PYTHON="$python" make test VENV="$scratch/python-{version}" """
    return Part(command, 2400)


def trainer(name: str) -> Part:
    return Part(f"make test-trainers ARGS={name}", 1800, default=False)


PARTS = {
    "docs": Part("make docs", 600, pytest=False),
    "pages": thorough(_APART["pages"]),
    "images": thorough(_APART["images"]),
    "drivers": thorough(_APART["drivers"]),
    "service": thorough(_APART["service"]),
    "rest": thorough("tests " + " ".join(f"--ignore={path}" for path in " ".join(_APART.values()).split())),
    # The sabotages, all in one file, are distributed to all workers.
    "conformance": thorough(f"{_APART['conformance']} --dist loadgroup"),
    "ordinary user": Part(f"scripts/as-ordinary-user.sh sh -ec {shlex.quote(_AS_USER)}", 3600),
    "Debian 12": Part("scripts/test-install.sh bookworm", 2400),
    "Debian 13": Part("scripts/test-install.sh trixie", 2400),
    "fuzz": Part("make fuzz ARGS='--seconds 10'", 1800, pytest=False),
    "faults": Part("make faults ARGS='--seconds 10'", 1800, pytest=False),
    "NeMo Gym 0.4": Part('make test-nemo NEMO_VENV="$scratch/nemo-0.4"', 3600),
    "NeMo Gym 0.7": Part('make test-nemo NEMO_GYM=0.7 NEMO_VENV="$scratch/nemo-0.7"', 3600),
    "Python 3.13": on_python("3.13"),
    "Python 3.14": on_python("3.14"),
    "SWE-bench": Part("make verify-swebench", 3600, default=False, pytest=False),
    "Ray": Part("make test-ray", 900, default=False),
    "llama.cpp": Part("make test-llamacpp", 900, default=False),
    "vLLM": Part("make test-vllm", 2400, default=False),
    "harnesses": Part("make test-harnesses", 2400, default=False),
    "cgroup v2": Part("make test-cgroup2", 2400, default=False),
    **{name: trainer(name.lower()) for name in ("Harbor", "TRL", "verl", "SkyRL", "OpenRLHF", "Atropos")},
    "frameworks": Part("make test-frameworks", 3600, default=False),
    "learn": Part(
        'make learn ARGS="--seeds 1 --steps 12 --out $scratch/learn-runs"', 5400, default=False, pytest=False
    ),
}


def main() -> None:
    options = parser().parse_args()
    if options.list:
        for name, part in PARTS.items():
            print(f"{name:14} {'' if part.default else '(only if named) '}{part.command.split('ARGS')[0]}")
        return
    names = options.only or [name for name, part in PARTS.items() if part.default]
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    tree = tested_tree()
    before = passed_before(options.out / "results.json", tree) if options.resume else {}
    outcomes: list[Outcome] = []
    install_programs()
    scratch = Path(tempfile.mkdtemp(prefix="prorl-full-"))
    try:
        for name in names:
            outcomes.append(before.get(name) or run(name, PARTS[name], scratch, options.out, tree))
            (options.out / "results.md").write_text(table(outcomes))
            listed = [dataclasses.asdict(outcome) for outcome in outcomes]
            (options.out / "results.json").write_text(json.dumps(listed, indent=2) + "\n")
    finally:
        shutil.rmtree(scratch)
    print(table(outcomes))
    sys.exit(any(outcome.result != "passed" for outcome in outcomes))


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="make test-full ARGS=...", description=__doc__)
    found.add_argument("--only", action="append", choices=PARTS, metavar="PART", help="may be repeated")
    found.add_argument("--list", action="store_true", help="list the parts")
    found.add_argument("--resume", action="store_true", help="skip parts that passed on the same files")
    found.add_argument(
        "--out", type=Path, default=ROOT / "build/test-full", help="folder for logs and results"
    )
    return found


def tested_tree() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()

    return "" if git("status", "--porcelain") else git("rev-parse", "HEAD^{tree}")


def passed_before(path: Path, tree: str) -> dict[str, Outcome]:
    """Return the outcomes of the parts that passed on the files of `tree`, by part."""
    if not tree or not path.exists():
        return {}
    found = [Outcome(**fields) for fields in json.loads(path.read_text())]
    return {outcome.part: outcome for outcome in found if outcome.result == "passed" and outcome.tree == tree}


def install_programs() -> None:
    """Install the optional programs if possible. Tests that need a missing program are skipped."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        print("optional programs are not installed: the installation needs root and apt", flush=True)
        return
    print("installing optional programs", flush=True)
    packages = "chromium qemu-user-static linux-libc-dev docker-registry skopeo umoci mmdebstrap patchelf"
    command = f"""apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 \
        install -y -q --no-install-recommends {packages}; scripts/install-apptainer.sh"""
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"warning: some programs could not be installed:\n{done.stderr[-1000:]}", flush=True)


def environment(scratch: Path) -> dict[str, str]:
    """Return the environment variables of a part; environments for peers are below `scratch`."""
    folders = {
        "npm_config_cache": "npm",
        "LLAMACPP_VENV": "llamacpp",
        "VLLM_VENV": "vllm",
        "TRAINERS_VENVS": "trainers",
        "FRAMEWORKS_VENVS": "frameworks",
        "LEARN_VENV": "learn",
        "CGROUP2_DIR": "cgroup2",
    }
    # The variables of the calling make, such as ARGS, would also apply to each part's make.
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "ARGS"))
    }
    return {
        **inherited,
        **{name: str(scratch / folder) for name, folder in folders.items()},
        "scratch": str(scratch),
        "PYTEST_ADDOPTS": "-raR -W error",  # warnings of dependencies are errors, too
    }


def run(name: str, part: Part, scratch: Path, out: Path, tree: str = "") -> Outcome:
    """Run one part up to its end or its time limit."""
    log = out / f"{re.sub('[^a-z0-9]+', '-', name.lower())}.log"
    print(f"== {name}: {log}", flush=True)
    date, start = datetime.datetime.now(datetime.UTC).date().isoformat(), time.monotonic()
    with log.open("wb") as file:
        child = subprocess.Popen(
            # Under `nohup` or `&` some signals are ignored; `env` restores the defaults.
            ["env", "--default-signal", "sh", "-c", part.command],
            cwd=ROOT,
            env=environment(scratch),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status = _wait(child, part.limit_s)
    duration = round(time.monotonic() - start)
    text = log.read_text(errors="replace")
    counts = tests_of(text) if part.pytest else None
    outcome = Outcome(
        part=name,
        command=" ".join(part.command.split()),
        result=result(status, counts, part.limit_s),
        passed=None if counts is None else counts["passed"],
        failed=None if counts is None else counts["failed"],
        rerun=None if counts is None else counts["rerun"],
        skipped=None if counts is None else counts["skipped"],
        duration_s=duration,
        date=date,
        tree=tree,
        skips=skips_of(text),
        reruns=_RERUN.findall(text),
    )
    print(f"   {outcome.result}, {duration} s", flush=True)
    return outcome


def _wait(child: subprocess.Popen[bytes], limit_s: int) -> int | None:
    """Return the exit status, or None at the time limit. All processes of the part's group are stopped."""
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


def tests_of(log: str) -> Counter[str]:
    """Return the counts of all pytest summaries in a log; errors count as failures."""
    counts: Counter[str] = Counter()
    for summary in _SUMMARY.findall(log):
        for number, kind in _COUNT.findall(summary):
            counts["failed" if kind.startswith("error") else kind] += int(number)
    return counts


def skips_of(log: str) -> dict[str, int]:
    """Return the reasons of skipped tests in a log, and the number of tests for each."""
    counts: Counter[str] = Counter()
    for number, reason in _SKIP.findall(log):
        counts[reason] += int(number)
    return dict(counts)


def result(status: int | None, counts: Counter[str] | None, limit_s: int) -> str:
    """Return "passed" or the reason of the failure. A part without a passed test lacks its peer."""
    if status is None:
        return f"did not finish in {limit_s // 60} min"
    if status != 0:
        return "failed"
    return "failed: no test ran" if counts is not None and not counts["passed"] else "passed"


def table(outcomes: Sequence[Outcome]) -> str:
    """Format the results as Markdown, then the tests that ran again and the reasons of skipped tests."""
    lines = [
        "| part | result | passed | failed | rerun | skipped | duration | date |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in outcomes:
        numbers = (row.passed, row.failed, row.rerun, row.skipped)
        counts = ["-" if count is None else str(count) for count in numbers]
        duration = f"{row.duration_s // 60}:{row.duration_s % 60:02}"
        lines.append(f"| {' | '.join([row.part, row.result, *counts, duration, row.date])} |")
    reruns = [f"- {row.part}: `{test}`" for row in outcomes for test in row.reruns]
    if reruns:
        lines += ["", "Ran again:", "", *reruns]
    reasons = [f"- {row.part}: {n} × {reason}" for row in outcomes for reason, n in row.skips.items()]
    if reasons:
        lines += ["", "Skipped:", "", *reasons]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
