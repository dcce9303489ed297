"""Stand-in for `start_server.py` that answers every request of a client and records it, without a rollout.

It appends one line of JSON for each request to the file named by `RECORD`.
"""

import argparse
import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

_LOCK = Lock()


class Recorder(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer({"status": "running"})

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with _LOCK, Path(os.environ["RECORD"]).open("a", encoding="utf-8") as file:
            file.write(json.dumps([self.path, json.loads(text) if text else None]) + "\n")
        self._answer({"resolved": True, "messages": [{"role": "assistant"}]})

    def _answer(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    ThreadingHTTPServer(("127.0.0.1", parser.parse_known_args()[0].port), Recorder).serve_forever()
