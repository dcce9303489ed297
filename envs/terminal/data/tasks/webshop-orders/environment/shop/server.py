"""Shop with an HTTP API. It keeps the orders in memory."""

import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

PRODUCTS: list[dict[str, Any]] = [
    {"name": name, "stock": stock, "minimum": minimum}
    for name, stock, minimum in (
        ("rice", 14, 10),
        ("tea", 3, 12),
        ("salt", 7, 7),
        ("milk", 0, 20),
        ("bread", 9, 15),
        ("apples", 40, 25),
        ("oil", 5, 6),
    )
]
PAGE = 3
ORDERS: list[dict[str, Any]] = []


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if url.path == "/orders":
            return self.answer(200, {"orders": ORDERS})
        page = parse_qs(url.query).get("page", ["1"])[0]
        if url.path != "/products" or not page.isdecimal() or int(page) < 1:
            return self.answer(404, {"error": "not found"})
        start = (int(page) - 1) * PAGE
        found: dict[str, Any] = {"products": PRODUCTS[start : start + PAGE]}
        if start + PAGE < len(PRODUCTS):
            found["next"] = int(page) + 1
        return self.answer(200, found)

    def do_POST(self) -> None:
        try:
            order = json.loads(self.rfile.read(min(int(self.headers.get("Content-Length", 0)), 10_000)))
            order = {"name": str(order["name"]), "count": int(order["count"])}
        except (ValueError, TypeError, LookupError):
            return self.answer(400, {"error": "not an order"})
        if self.path != "/orders" or len(ORDERS) >= 1000:
            return self.answer(404, {"error": "not found"})
        ORDERS.append(order)
        return self.answer(201, order)

    def answer(self, status: int, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


ThreadingHTTPServer(("", int(os.environ["PORT"])), Handler).serve_forever()
