import json
import urllib.request
from pathlib import Path

expected = [("bread", 6), ("milk", 20), ("oil", 1), ("tea", 9)]
with urllib.request.urlopen("http://shop:8080/orders", timeout=10) as answer:
    orders = sorted((order["name"], order["count"]) for order in json.load(answer)["orders"])
try:
    written = Path("/app/orders.txt").read_text().strip()
except OSError:
    written = ""
reward = float(orders == expected and written == "4")
Path("/logs/verifier/reward.txt").write_text(str(reward))
