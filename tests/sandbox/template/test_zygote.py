"""Template process whose forks fail."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import prorl_envs

#: Serves without imports, as a user that may have no further process. Root is exempt from that limit, so
#: root becomes another user first.
_SERVE = """
import os, resource, socket, sys
sys.path.append(sys.argv[1])
from prorl_envs.sandbox.template import zygote
if os.geteuid() == 0:
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
zygote._serve(socket.socket(fileno=0), zygote._Prepared({}, False, True, {}, [], 2))
"""


def test_a_failed_fork_is_reported_and_the_template_survives() -> None:
    control, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    folder = Path(next(iter(prorl_envs.__path__))).parent
    with inside:
        template = subprocess.Popen(
            [sys.executable, "-I", "-c", _SERVE, str(folder)], stdin=inside.fileno(), stderr=subprocess.PIPE
        )
    with control, template:
        for _ in range(2):
            status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with status, theirs:
                request = json.dumps({"route": True}).encode()
                socket.send_fds(control, [request], [control.fileno(), theirs.fileno()])
                theirs.close()
                assert "BlockingIOError" in json.loads(status.recv(65536))["summary"]
                assert status.recv(1) == b""  # the template holds no descriptor of the failed request
        control.close()
        assert template.wait() == 0
        assert template.stderr is not None
        assert template.stderr.read() == b""
