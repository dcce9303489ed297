"""Figures 1 to 4, compared with their floors and peers.

python -m bench                                   # all; some minutes
python -m bench --only bash --rounds 5 --subjects ours,floor
"""

import argparse
import dataclasses
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import report, results
from bench.figures import Bench, Scale
from bench.process import ENVIRONMENTS, ROOT
from bench.results import Claim, Row
from tests.sandbox.rootfs import build_sif, missing_for_sif, write_rootfs

FIGURES = ("bash", "ready", "memory", "cell")


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the exception closes the resources
    scale = Scale(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Scale)})
    image, no_image = _image()
    print(machine(), "\n")
    data: dict[str, Any] = {"machine": machine(), "scale": dataclasses.asdict(scale)}
    with tempfile.TemporaryDirectory(prefix="prb-", ignore_cleanup_errors=True) as scratch:
        chosen = options.subjects.split(",") if options.subjects else []
        bench = Bench(
            scale,
            Path(scratch),
            image,
            no_image,
            lambda entry: not chosen or entry.module in chosen or entry.key in chosen,
            lambda text: print(text, file=sys.stderr, flush=True),
        )
        for figure in options.only.split(","):
            rows, claims, text = _measure(bench, figure)
            print(text, flush=True)
            data[figure] = {
                "load": os.getloadavg(),
                "rows": {key: dataclasses.asdict(row) for key, row in rows.items()},
                "claims": [{**dataclasses.asdict(claim), "met": claim.met} for claim in claims],
            }
    print(f"Load at the end: {_load()}.")
    if options.json:
        options.json.write_text(json.dumps(data, indent=1))


def _measure(bench: Bench, figure: str) -> tuple[dict[str, Row], list[Claim], str]:
    sessions, live = bench.scale.sessions, bench.scale.live
    match figure:
        case "bash":
            rows = bench.bash()
            claims = results.bash_claims(rows, sessions)
            return rows, claims, report.figure_1(rows, claims, sessions)
        case "ready":
            rows = bench.ready()
            claims = results.ready_claims(rows)
            return rows, claims, report.figure_2(rows, claims)
        case "memory":
            rows = bench.memory()
            claims = results.memory_claims(rows, live)
            return rows, claims, report.figure_3(rows, claims)
        case _:
            rows = bench.cell()
            claims = results.cell_claims(rows)
            return rows, claims, report.figure_4(rows, claims)


def machine() -> str:
    """Return a description of the machine and its load in one line."""
    cpus = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    model = cpus[0].partition(":")[2].strip() if cpus else platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    user = "root" if os.geteuid() == 0 else "an ordinary user"
    return (
        f"{os.cpu_count()} cores ({model}), {memory:.0f} GB, Linux {platform.release()}, "
        f"Python {platform.python_version()}, as {user}, prorl-envs at {commit}, load {_load()}."
    )


def _load() -> str:
    return " ".join(f"{load:.1f}" for load in os.getloadavg())


def _image() -> tuple[Path | None, str]:
    """Return a small SIF of this machine's programs, built at first use; or None, and the reason."""
    sif = ENVIRONMENTS / "image.sif"
    if sif.exists():
        return sif, ""
    if reason := missing_for_sif():
        return None, reason
    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            built = build_sif(write_rootfs(Path(folder, "root")), Path(folder, "image.sif"))
        except subprocess.CalledProcessError as error:
            return None, f"apptainer build: {error.stderr.decode(errors='replace').strip()[-200:]}"
        shutil.move(built, sif)
    return sif, ""


def _figures(text: str) -> str:
    if unknown := set(text.split(",")) - set(FIGURES):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; figures: {', '.join(FIGURES)}")
    return text


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", type=_figures, default=",".join(FIGURES), help="figures, with commas")
    parser.add_argument("--subjects", default="", help="modules of bench/subjects, with commas")
    parser.add_argument("--json", type=Path, help="file for all measured values")
    scale = Scale()
    for field in dataclasses.fields(Scale):
        kind: Callable[[str], float] = float if field.type is float else int
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=kind, default=getattr(scale, field.name))
    return parser.parse_args()


if __name__ == "__main__":
    main()
