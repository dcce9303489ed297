"""Temporary PostgreSQL server, on a Unix socket in its own directory.

```python
with local_postgres() as url:
    store = PostgresStore(url)
```
"""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prorl_envs.errors import InputError

#: Folders of distributions that do not put the programs into PATH, the newest last.
_ELSEWHERE = ("/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin")
_DURABLE = "-c listen_addresses='' -c max_connections=20 -c shared_buffers=16MB"
#: Unsafe only for data that must survive a crash of the machine; tests only kill processes.
_QUICK = "-c fsync=off"


def postgres_programs() -> Path | None:
    """Return the folder of `initdb` and `pg_ctl`, or None if PostgreSQL is not installed."""
    found = [
        path.parent for pattern in _ELSEWHERE for path in sorted(Path("/").glob(f"{pattern[1:]}/initdb"))
    ]
    if (program := shutil.which("initdb")) is not None:
        found.append(Path(program).parent)
    return next((folder for folder in reversed(found) if (folder / "pg_ctl").exists()), None)


@contextmanager
def local_postgres() -> Iterator[str]:
    """Run a new server during the block; yield its URL. If the user is root, the server runs as `nobody`.

    Raises:
        InputError: PostgreSQL is not installed, or does not start; the hint has its last output.
    """
    programs = postgres_programs()
    if programs is None:
        raise InputError("PostgreSQL is not installed", hint="apt-get install postgresql")
    user = "nobody" if os.geteuid() == 0 else None  # it refuses to run as root
    folder = Path(tempfile.mkdtemp(prefix="prpg-"))
    try:
        if user is not None:
            os.chown(folder, pwd.getpwnam(user).pw_uid, -1)
        data, log = folder / "data", folder / "log"
        _run(user, programs / "initdb", "-D", data, "-U", "prorl", "-A", "trust", "--no-sync", "-E", "UTF8")
        options = f"{_DURABLE} {_QUICK} -k {folder}"
        _run(user, programs / "pg_ctl", "-D", data, "-o", options, "-l", log, "-w", "start")
        try:
            yield f"postgresql://prorl@/postgres?host={folder}"
        finally:
            _run(user, programs / "pg_ctl", "-D", data, "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(folder)


def _run(user: str | None, *command: str | Path) -> None:
    # Its output goes to a file: the server would keep a pipe open.
    with tempfile.TemporaryFile() as output:
        done = subprocess.run(
            [str(part) for part in command],
            user=user,
            cwd="/",
            env={"PATH": os.environ.get("PATH", ""), "LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            check=False,
        )
        if done.returncode:
            output.seek(0)
            said = output.read().decode(errors="replace").strip()[-500:]
            raise InputError(f"{Path(command[0]).name} failed", hint=said)
