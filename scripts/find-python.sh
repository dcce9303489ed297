#!/bin/sh
# Print the path of a working Python of a version: find-python.sh 3.13 [DIRECTORY]. Fails if there is none.
# The script searches PATH, pyenv, /opt and uv. If it finds none, it unpacks Debian's Python into DIRECTORY, if given.
set -eu
cd "$(dirname "$0")/.."
. scripts/common.sh
[ $# -ge 1 ] || fail "find-python.sh needs a version" "give one such as 3.13"
version=$1

fits() { "$1" -c "import sys, ssl, sqlite3; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null; }

for path in "$(command -v "python$version")" "${VENV:-.venv}/bin/python" \
    "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/"$version"*/bin/python3 "/opt/python$version"*/bin/python3 \
    "$(scripts/uv.sh python find --no-project "$version" 2>/dev/null)"; do
    if [ -x "$path" ] && fits "$path"; then printf '%s\n' "$path"; exit; fi
done
[ $# -lt 2 ] || exec scripts/unpack-python.sh "$version" "$2"
fail "no Python $version was found" "uv python install $version"
