"""ipykernel behind jupyter-client over `tcp` or `ipc`, and behind a kernel `gateway` over a WebSocket."""

import importlib.metadata
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from typing import Any

import websocket
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from bench.subjects.protocol import Session, attempts, cell_task, free_port, serve

TIMEOUT_S = 60.0


class Output:
    """Output of a cell, collected from the kernel's messages until the kernel is idle."""

    def __init__(self, request: str) -> None:
        self._request = request
        self.text = ""
        self.replied = self.idle = False

    def add(self, message: dict[str, Any]) -> None:
        if message["parent_header"].get("msg_id") != self._request:
            return
        content = message["content"]
        match message["header"]["msg_type"]:
            case "stream":
                self.text += content["text"]
            case "execute_result":
                self.text += content["data"]["text/plain"]
            case "error":
                raise RuntimeError("\n".join(content["traceback"]))
            case "status" if content["execution_state"] == "idle":
                self.idle = True
            case "execute_reply":
                self.replied = True


class Kernel:
    """Kernel started by this process."""

    def __init__(self, transport: str) -> None:
        self._manager = KernelManager(kernel_name="python3", transport=transport)
        self._manager.start_kernel()
        self._client: BlockingKernelClient = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=TIMEOUT_S)

    @property
    def pid(self) -> int:
        return int(self._manager.provisioner.pid)  # type: ignore[union-attr]

    def act(self, text: str) -> str:
        output = Output(self._client.execute(text))
        while not output.replied:
            output.add(self._client.get_shell_msg(timeout=TIMEOUT_S))
        while not output.idle:
            output.add(self._client.get_iopub_msg(timeout=TIMEOUT_S))
        return output.text

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


class GatewayKernel:
    """Kernel started by the gateway."""

    def __init__(self, port: int) -> None:
        self._http = f"http://127.0.0.1:{port}/api/kernels"
        self._id = _ask("POST", self._http)["id"]
        self._socket = websocket.create_connection(
            f"ws://127.0.0.1:{port}/api/kernels/{self._id}/channels", timeout=TIMEOUT_S
        )

    def act(self, text: str) -> str:
        id_ = uuid.uuid4().hex
        header = {"msg_id": id_, "msg_type": "execute_request", "session": self._id, "username": "bench"}
        content = {"code": text, "silent": False, "store_history": True, "allow_stdin": False}
        message = {
            "header": {**header, "version": "5.3"},
            "parent_header": {},
            "metadata": {},
            "content": content,
        }
        self._socket.send(json.dumps({**message, "channel": "shell"}))
        output = Output(id_)
        while not (output.replied and output.idle):
            output.add(json.loads(self._socket.recv()))
        return output.text

    def close(self) -> None:
        self._socket.close()
        _ask("DELETE", f"{self._http}/{self._id}")


def _ask(method: str, url: str) -> Any:
    request = urllib.request.Request(url, b"{}" if method == "POST" else None, method=method)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return json.loads(answer.read() or "null")


class Jupyter:
    blocking = True
    task = staticmethod(cell_task)

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._kernels: list[Kernel] = []
        self._gateway: subprocess.Popen[bytes] | None = None
        self._port = 0

    def prepare(self) -> str:
        version = f"ipykernel {importlib.metadata.version('ipykernel')}"
        if self._kind != "gateway":
            return version
        self._port = free_port()
        program = str(Path(sys.executable).parent / "jupyter-kernelgateway")
        options = [f"--KernelGatewayApp.port={self._port}", "--KernelGatewayApp.ip=127.0.0.1"]
        self._gateway = subprocess.Popen([sys.executable, program, *options], cwd=os.environ["HOME"])
        for remaining_s in attempts(TIMEOUT_S):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/api", timeout=remaining_s):
                    break
            except urllib.error.URLError:  # the gateway has not started
                continue
        return f"jupyter-kernel-gateway {importlib.metadata.version('jupyter-kernel-gateway')}, {version}"

    def open(self) -> Session:
        if self._kind == "gateway":
            return GatewayKernel(self._port)
        self._kernels.append(Kernel(self._kind))
        return self._kernels[-1]

    def pids(self) -> list[int]:
        return [kernel.pid for kernel in self._kernels]

    def close(self) -> None:
        if self._gateway is not None:
            self._gateway.terminate()
            self._gateway.wait()


if __name__ == "__main__":
    serve(Jupyter(sys.argv[1]))
