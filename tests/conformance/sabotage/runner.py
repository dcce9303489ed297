"""Run the conformance suite against a copy of the package from which one protection was removed.

`python -m tests.conformance.sabotage.runner [WORDS]` runs the patches whose protection has these words.
"""

import compileall
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import prorl_envs
from tests.conformance.images import write_image

PACKAGE = Path(prorl_envs.__file__).parent
#: Number of patches that run at once.
AT_A_TIME = 2
_TIMEOUT_S = 240
#: Errors of a start without a namespace; any other error would hide that a sandbox starts.
_NO_SANDBOX = re.compile(r"could not join the sandbox|did not start|gave the sandbox no namespace")
_MAIN = "from prorl_envs.cli.main import app; app()"


@dataclass(frozen=True, slots=True)
class Patch:
    """One protection, and how to remove it.

    Args:
        protection: in words; unique.
        file: below the package.
        before: text that occurs exactly once in the file.
        after: its replacement.
        caught_by: promises that all break.
        no_sandbox: no sandbox starts without it; replaces `caught_by`.
        no_effect: why nothing changes inside. `checked_by` are then promises that are still kept.
        driver: the driver that has this protection.
        image: whether it protects sandboxes with an image.
        emulate_root: whether it protects sandboxes with an emulated root.
        only_root: whether the promises break only for root.
        refused_by: a setting below /proc/sys, and its values with which the kernel refuses the same.
    """

    protection: str
    file: str
    before: str
    after: str
    caught_by: tuple[str, ...] = ()
    no_sandbox: bool = False
    no_effect: str = ""
    checked_by: tuple[str, ...] = ()
    driver: str = "bubblewrap"
    image: bool = False
    emulate_root: bool = False
    only_root: bool = False
    refused_by: tuple[str, ...] = ()

    def applied(self, text: str) -> str:
        """Return the file without the protection.

        Raises:
            ValueError: the patch is stale.
        """
        if (count := text.count(self.before)) != 1:
            raise ValueError(f"{self.protection}: found {count} times in {self.file}: {self.before!r}")
        return text.replace(self.before, self.after)

    @property
    def has_effect(self) -> bool:
        """Return whether promises break on this machine."""
        if self.refused_by:
            setting, *values = self.refused_by
            file = Path("/proc/sys", setting)
            return not (file.exists() and file.read_text().strip() in values)
        return not self.no_effect

    @property
    def applies_here(self) -> bool:
        """Return whether promises break for this user."""
        return not self.only_root or os.geteuid() == 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of the suite for a patched copy.

    Args:
        error: the end of its output, if there are no outcomes.
        outcomes: the state of each promise.
    """

    error: str = ""
    outcomes: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def problem(self, patch: Patch) -> str:
        """Return how the outcome differs from the patch's claim; "" if it does not."""
        if patch.no_sandbox:
            found = self.error or f"a sandbox started: {self.outcomes}"
            return "" if _NO_SANDBOX.search(self.error) else found
        if self.error:
            return f"the suite came to no outcomes: {self.error}"
        wanted = "broken" if patch.has_effect else "kept"
        named = patch.caught_by or patch.checked_by
        wrong = {id_: self.outcomes.get(id_) for id_ in named if self.outcomes.get(id_) != wanted}
        return f"not {wanted}: {wrong}; {self.reasons}" if wrong else ""


class Workshop:
    """Clean copy of the package, and images: the source of patched copies."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._clean = path / "clean"
        shutil.copytree(
            PACKAGE, self._clean / "prorl_envs", ignore=shutil.ignore_patterns("envs", "__pycache__")
        )
        # Compiled once, not in each copy: copies keep the modification times that validate compiled code.
        compileall.compile_dir(self._clean, quiet=2)
        self._image = write_image(path / "image")

    def try_out(self, patch: Patch) -> Verdict:
        """Run the promises that a patch names against a patched copy."""
        with self._patched(patch) as folder:
            return self._conformance(patch, folder)

    @contextmanager
    def _patched(self, patch: Patch) -> Iterator[Path]:
        folder = Path(tempfile.mkdtemp(prefix="sab-", dir=self._path))
        try:
            shutil.copytree(self._clean, folder / "code")
            (folder / "run").mkdir()
            file = folder / "code" / "prorl_envs" / patch.file
            file.write_text(patch.applied(file.read_text()))
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _conformance(self, patch: Patch, folder: Path) -> Verdict:
        promises = ",".join((*patch.caught_by, *patch.checked_by)) or "WAY-001"
        options = ["--driver", patch.driver, "--only", promises, "--json"]
        # A sandbox without a protection may leak processes, which the supervisor kills.
        supervisor = [sys.executable, "-I", "-m", "prorl_envs.images.supervisor", str(folder), "same"]
        suite = [sys.executable, "-P", "-c", _MAIN, "conformance", *options, *self._image_options(patch)]
        stdin, leash = os.pipe()
        try:
            done = subprocess.run(
                [*supervisor, *suite],
                cwd=folder / "code",
                env={**os.environ, "PYTHONPATH": str(folder / "code"), "PRORL_RUN_DIR": str(folder / "run")},
                stdin=stdin,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
        finally:
            os.close(stdin)
            os.close(leash)
        if not done.stdout:
            return Verdict(error=done.stderr.strip()[-500:] or f"exit status {done.returncode}")
        outcomes = json.loads(done.stdout)["outcomes"]
        return Verdict(
            outcomes={outcome["id"]: outcome["state"] for outcome in outcomes},
            reasons={outcome["id"]: outcome["reason"][:300] for outcome in outcomes},
        )

    def _image_options(self, patch: Patch) -> list[str]:
        image = ["--image", str(self._image)] if patch.image or patch.emulate_root else []
        return [*image, "--emulate-root"] if patch.emulate_root else image


def main(words: list[str]) -> int:
    """Try the patches with these words; print the outcome of each."""
    from tests.conformance.sabotage.patches import PATCHES

    chosen = [p for p in PATCHES if p.applies_here and all(word in p.protection for word in words)]
    problems = 0
    with tempfile.TemporaryDirectory(prefix="sabotage-") as path, ThreadPoolExecutor(AT_A_TIME) as pool:
        workshop = Workshop(Path(path))
        for patch, verdict in zip(chosen, pool.map(workshop.try_out, chosen), strict=True):
            problem = verdict.problem(patch)
            problems += bool(problem)
            print(f"{'PROBLEM' if problem else 'ok':8}{patch.protection}: {problem}", flush=True)  # noqa: T201
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
