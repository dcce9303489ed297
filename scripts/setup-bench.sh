#!/bin/sh
# Install the peers that bench/ measures, each from PyPI into an environment of its own: setup-bench.sh [VENV].
# What cannot be installed is noted, and the table says so; nothing here fails. About 2.5 GB, some minutes.
# Two of them need tmux: as root it is installed where it is missing, otherwise the table says that it is.
set -u
cd "$(dirname "$0")/.." || exit 1
venv=${1:-.venv}
place=.build/bench
uv=$(command -v uv || printf '%s' "$venv/bin/uv")
mkdir -p "$place"

if ! command -v tmux >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get update -q && apt-get install -y -q --no-install-recommends tmux; } >"$place/tmux.log" 2>&1
fi

for pins in bench/subjects/*.txt; do
    name=$(basename "$pins" .txt)
    target=$place/$name
    cmp -s "$pins" "$target/installed.txt" && continue
    printf 'installing %s into %s\n' "$(tr '\n' ' ' <"$pins")" "$target" >&2
    rm -rf "$target" "$place/$name.failed"
    if "$uv" venv --quiet --python "$venv/bin/python" "$target" 2>"$place/$name.log" \
        && "$uv" pip install --quiet --python "$target/bin/python" -r "$pins" 2>>"$place/$name.log"; then
        cp "$pins" "$target/installed.txt"
    else
        mv "$place/$name.log" "$place/$name.failed"
        printf '  failed: see %s\n' "$place/$name.failed" >&2
    fi
done
