#!/bin/sh
# Run uv with the certificates and the index that pip is configured for: uv.sh COMMAND [ARGUMENT ...]. It shows
# its progress on a terminal, and only errors elsewhere.
#   VENV  the environment that setup.sh made (.venv): `uv pip` changes it, unless --python names another
set -eu
cd "$(dirname "$0")/.."
. scripts/common.sh
uv=$(find_uv) || fail "uv was not found" "run scripts/setup.sh first"
trust_certificates
use_index
quiet=
if [ ! -t 2 ] && [ "$1" != python ]; then quiet=--quiet; fi # for `uv python` that hides results and errors
VIRTUAL_ENV=${VENV:-.venv} exec "$uv" $quiet "$@"
