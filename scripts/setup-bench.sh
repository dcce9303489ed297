#!/bin/sh
# Install the peers of bench/ from PyPI, each into its own environment: setup-bench.sh [VENV]. Takes some minutes and
# about 2.5 GB. If a peer cannot be installed, the script continues, and the table shows the reason. Two peers need
# tmux; the script installs it if it is missing and the user is root.
set -u
cd "$(dirname "$0")/.." || exit 1
venv=${1:-.venv}
export VENV="$venv"
place=.build/bench
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
    if scripts/uv.sh venv --python "$venv/bin/python" "$target" 2>"$place/$name.log" \
        && scripts/uv.sh pip install --python "$target/bin/python" -r "$pins" 2>>"$place/$name.log"; then
        cp "$pins" "$target/installed.txt"
    else
        mv "$place/$name.log" "$place/$name.failed"
        printf '  failed: see %s\n' "$place/$name.failed" >&2
    fi
done
