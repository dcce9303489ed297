#!/bin/sh
# Run uv with pip's certificates and index: uv.sh COMMAND [ARGUMENT ...]. uv shows its progress on a terminal; if the
# output is not a terminal, it shows only errors.
#   VENV  environment of setup.sh (.venv); `uv pip` changes this environment unless --python names another
set -eu
cd "$(dirname "$0")/.."
. scripts/common.sh
uv=$(find_uv) || fail "uv was not found" "run scripts/setup.sh first"
trust_certificates
use_index
quiet=
if [ ! -t 2 ] && [ "$1" != python ]; then quiet=--quiet; fi # --quiet would hide the results of `uv python`
VIRTUAL_ENV=${VENV:-.venv} exec "$uv" $quiet "$@"
