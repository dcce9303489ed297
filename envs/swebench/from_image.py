"""Build of an instance from its container image: copies the tree out of the image once, without its history.

In the image, the tree may have the repository's later commits, tags and reflogs, and other folders may have
the tests or the reference. The build makes a tree with one commit, which replaces the image's own tree in the
sandboxes.
"""

import hashlib
import json
import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from prorl_envs.env.node import Node
from prorl_envs.env.sandboxed import sandbox_session
from prorl_envs.envs.swebench.root import TESTBED
from prorl_envs.envs.swebench.steps import EXCLUDED, GIT, INIT, SEAL, step, tagged
from prorl_envs.envs.swebench.task import SwebenchTask
from prorl_envs.sandbox.base import Mount, SandboxSpec
from prorl_envs.sandbox.filesystem.mount_plan import DEFAULT_ENV

#: Increase it when the layout or the build method changes.
_FORMAT = 1
_OUT = "/opt/built"
#: Python directories of the data sets' images; missing ones are harmless.
_PYTHONS = ("{testbed}/.venv/bin", "/opt/miniconda3/envs/testbed/bin", "/opt/miniconda3/bin")


class Build:
    """One build.

    Args:
        node: runs the sandbox.
        task: the instance.
        image: the image of the instance: a SIF file, or a directory.
    """

    def __init__(self, node: Node, task: SwebenchTask, image: Path) -> None:
        self._node, self._task, self._image = node, task, image

    @property
    def key(self) -> str:
        """A name derived from everything that determines the content.

        An image is identified by its path, size and time of modification.
        """
        task, status = self._task, self._image.stat()
        content = {
            "format": _FORMAT,
            "image": [str(self._image), status.st_size, status.st_mtime_ns],
            "task": [task.testbed, task.hidden_files, task.hidden_paths, task.patch if task.bug else ""],
            "uid": os.getuid(),
        }
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        return f"{task.id.lower()[:80]}-{digest[:24]}"

    async def into(self, staging: Path, progress: Callable[[str], None]) -> dict[str, Any]:
        """Build into a folder; return the fields of `BuiltRoot`."""
        for name in ("testbed", "hidden"):
            (staging / name).mkdir()
        (staging / "empty").touch()
        progress("copying the tree out of the image")
        out = Mount(source=staging, target=_OUT, writable=True)
        spec = SandboxSpec(image=self._image, workdir="/workspace", mounts=(out,), uid=0)
        async with sandbox_session(self._node, spec) as session:
            answer = json.loads(await step(session, "copy", self._copy(), cwd="/"))
        progress("committing")
        tree = Mount(source=staging / "testbed", target=TESTBED, writable=True)
        spec = SandboxSpec(workdir="/workspace", mounts=(tree, out))
        async with sandbox_session(self._node, spec) as session:
            await self._commit(session, answer["tag"])
            commit = (await step(session, "commit", "git rev-parse HEAD")).strip()
        return {
            "base_commit": commit,
            "testbed": self._task.testbed,
            "image": self._image,
            "env": await self._env(),
            "hidden_directories": answer["directories"],
            "hidden_files": answer["files"],
        }

    def _copy(self) -> str:
        """Return the script that copies the tree, and prints its tag and existing hidden paths as JSON."""
        task = self._task
        testbed = shlex.quote(task.testbed)
        lines = [
            f"[ -d {testbed} ] || {{ echo 'the image has no {task.testbed}'; exit 1; }}",
            f"cp -a {testbed}/. {_OUT}/testbed/",
            f"cd {testbed}",
            f"git -c safe.directory='*' ls-files -z > {_OUT}/tracked 2>/dev/null || : > {_OUT}/tracked",
            "tag=$(git -c safe.directory='*' describe --tags --abbrev=0 2>/dev/null || true)",
        ]
        for kind, option in (("directories", "-d"), ("files", "-f")):
            tests = "".join(
                f'[ ! {option} {path} ] || {kind}="${kind}${{{kind}:+,}}\\"{path}\\""\n'
                for path in task.hidden_paths
            )
            lines.append(f"{kind}=\n{tests}")
        lines.append(
            'case "$tag" in *[!A-Za-z0-9._-]*) tag= ;; esac\n'
            'printf \'{"tag": "%s", "directories": [%s], "files": [%s]}\' "$tag" "$directories" "$files"'
        )
        return "\n".join(lines)

    async def _commit(self, session: Any, tag: str) -> None:
        for path in self._task.hidden_files:
            name = shlex.quote(path)
            move = f"[ ! -e {name} ] && [ ! -L {name} ] || mv -- {name} {_OUT}/hidden/"
            await step(session, "hide", move)
        # Tracked files stay tracked, even if a .gitignore names them.
        tracked = (
            "while IFS= read -r -d '' path; do\n"
            'if [ -f "$path" ] || [ -L "$path" ]; then printf \'%s\\0\' "$path"; fi\n'
            f"done < {_OUT}/tracked | git update-index --add -z --stdin\n"
        )
        await step(session, "commit", "rm -rf .git")
        if self._task.bug:
            text = self._task.patch if self._task.patch.endswith("\n") else f"{self._task.patch}\n"
            apply_once = (
                "git apply --reverse --check - < /tmp/bug 2>/dev/null || "
                "git apply --whitespace=nowarn - < /tmp/bug"
            )
            await step(session, "bug", f"{GIT}\ncat > /tmp/bug\n{apply_once}", stdin=text.encode())
        await step(session, "commit", GIT + INIT, stdin=EXCLUDED.encode())
        await step(session, "commit", GIT + tracked + SEAL + tagged(tag) + f"rm -f {_OUT}/tracked")

    async def _env(self) -> Mapping[str, str]:
        read = getattr(self._node.driver, "image_env", None)
        found = dict(await read(self._image)) if read is not None else {}
        pythons = ":".join(path.format(testbed=self._task.testbed) for path in _PYTHONS)
        return {**found, "PATH": f"{pythons}:{found.get('PATH') or DEFAULT_ENV['PATH']}"}
