"""Real HTTP server in a thread, for tests and tools without an event loop."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from prorl_envs.errors import ProrlError


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """Serve `app` on the loopback interface, in a thread, while the block runs.

    Yields:
        The base URL, `http://127.0.0.1:<port>`.

    Raises:
        ProrlError: the server did not start; its log contains the reason.
    """
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning")
    sock = config.bind_socket()
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, name="served")
    thread.start()
    try:
        # The socket starts to listen when the server runs; an earlier connection would be refused.
        while not server.started:
            if not thread.is_alive():
                raise ProrlError("the server did not start", hint="see its log above")
            time.sleep(0.005)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        sock.close()
