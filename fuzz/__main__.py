"""Run the targets one after the other, and print the outcome of each."""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from fuzz.targets import TARGETS

#: libFuzzer's output at the end, and during a run.
_RUNS = re.compile(r"Done (\d+) runs|^#(\d+)\s", re.MULTILINE)
_MEMORY_MB = 1024
#: Seconds that one input may take.
_ONE_S = 20


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=int, default=30, help="for each target")
    parser.add_argument("--corpus", type=Path, help="keeps what was found worth keeping, for the next time")
    parser.add_argument("--found", type=Path, default=Path("runs/fuzz"), help="where findings are put")
    options = parser.parse_args()
    if unknown := set(options.targets) - set(TARGETS):
        parser.error(f"no target {', '.join(sorted(unknown))}; there are: {', '.join(TARGETS)}")
    options.found.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        corpus = options.corpus or Path(scratch)
        names = options.targets or TARGETS
        good = [fuzz(name, options.seconds, corpus / name, options.found) for name in names]
    sys.exit(not all(good))


def fuzz(name: str, seconds: int, corpus: Path, found: Path) -> bool:
    """Fuzz one target, print a line, and return whether nothing was found.

    Args:
        seconds: duration.
        corpus: folder of initial inputs, to which the seeds and new inputs are added.
        found: folder for failing inputs.
    """
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(TARGETS[name].seeds()):
        (corpus / f"seed{number}").write_bytes(seed)
    limits = [f"-max_total_time={seconds}", f"-rss_limit_mb={_MEMORY_MB}", f"-timeout={_ONE_S}"]
    command = [sys.executable, "-m", "fuzz.one", name, *limits, "-print_final_stats=1"]
    command += [f"-artifact_prefix={found / name}-", "-max_len=8192", str(corpus)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    said = done.stdout + done.stderr
    runs = max((int(a or b) for a, b in _RUNS.findall(said)), default=0)
    good = done.returncode == 0 and runs > 0
    print(f"{name:12} {runs:>10,} executions  {'no finding' if good else 'FOUND:'}", flush=True)
    if not good:
        print(said[-4000:], flush=True)
    return good


if __name__ == "__main__":
    main()
