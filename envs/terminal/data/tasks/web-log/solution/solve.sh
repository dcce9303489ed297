#!/bin/bash
python3 - <<'END'
import json
import re

line = re.compile(r"\S+ [A-Z]+ ([^ ?]+)\S* (\d{3}) ([\d.]+)ms")
found = {}
for text in open("/app/access.log"):
    if match := line.fullmatch(text.strip()):
        path, status, ms = match.groups()
        found.setdefault(path, []).append((int(status), float(ms)))
report = {
    path: {
        "requests": len(all_of),
        "errors": sum(status >= 500 for status, _ in all_of) / len(all_of),
        "slowest_ms": max(ms for _, ms in all_of),
    }
    for path, all_of in found.items()
    if len(all_of) > 1
}
json.dump(report, open("/app/report.json", "w"))
END
