"""Apptainer with a process per command, like NeMo Gym's provider: `instance IMAGE`, or `image IMAGE`.

`instance` runs `apptainer exec instance://...`; its sessions share one instance, because an instance takes
seconds to start and to stop. `image` runs `apptainer exec IMAGE`, which creates a new container for each
command.
"""

import contextlib
import secrets
import subprocess
import sys

from bench.subjects.protocol import bash_task, serve

APPTAINER = ("apptainer", "--silent")


class Exec:
    def __init__(self, target: list[str]) -> None:
        self._argv = [*APPTAINER, "exec", *target, "bash", "-c"]

    def act(self, text: str) -> str:
        done = subprocess.run(
            [*self._argv, text], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True
        )
        return done.stdout.decode()

    def close(self) -> None:
        pass


class Apptainer:
    blocking = True
    task = staticmethod(bash_task)

    def __init__(self, kind: str, image: str) -> None:
        self._kind = kind
        self._image = image
        self._instance = f"bench{secrets.token_hex(4)}"

    def prepare(self) -> str:
        if self._kind == "instance":
            # The output is not a pipe, because the instance does not close it before it stops.
            subprocess.run(
                [*APPTAINER, "instance", "start", "--userns", self._image, self._instance],
                stdin=subprocess.DEVNULL,
                check=True,
            )
        return subprocess.run(
            ["apptainer", "--version"], stdout=subprocess.PIPE, check=True, text=True
        ).stdout.strip()

    def open(self) -> Exec:
        if self._kind == "instance":
            return Exec([f"instance://{self._instance}"])
        return Exec(["--userns", self._image])

    def pids(self) -> list[int]:
        return []

    def close(self) -> None:
        if self._kind == "instance":
            with contextlib.suppress(subprocess.CalledProcessError):  # the instance has not started
                subprocess.run([*APPTAINER, "instance", "stop", self._instance], check=True)


if __name__ == "__main__":
    serve(Apptainer(*sys.argv[1:]))
