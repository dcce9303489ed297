# shellcheck shell=sh
# Functions of the scripts in this folder. The scripts source this file in the repository's root.

say() { printf '%s\n' "$*" >&2; }
fail() { say "error: $1"; say "hint: $2"; exit 1; }

# Print the path of the user's uv, or of the uv that setup.sh has installed. Fails if there is none.
find_uv() {
    command -v uv && return
    for path in "${VENV:-.venv}/bin/uv" .build/uv/bin/uv; do
        if [ -x "$path" ]; then printf '%s\n' "$path"; return; fi
    done
    return 1
}

# Print a setting of pip's configuration files, or nothing.
pip_config() {
    for python in "${VENV:-.venv}/bin/python" python3; do
        if listed=$("$python" -m pip config list 2>/dev/null); then
            printf '%s\n' "$listed" | sed -n "s/^\(global\|install\)\.$1='\(.*\)'\$/\2/p" | tail -1
            return
        fi
    done
}

# uv trusts a built-in list of authorities, so it fails behind a proxy that intercepts TLS (UnknownIssuer). Use pip's
# certificates, or the system's if pip has none. Every version of uv reads SSL_CERT_FILE.
trust_certificates() {
    [ -z "${SSL_CERT_FILE:-}${SSL_CERT_DIR:-}${UV_SYSTEM_CERTS:-}${UV_NATIVE_TLS:-}" ] || return 0
    certificates=${PIP_CERT:-${REQUESTS_CA_BUNDLE:-${CURL_CA_BUNDLE:-$(pip_config cert)}}}
    for path in /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt /etc/ssl/ca-bundle.pem \
        /etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem /etc/ssl/cert.pem; do
        if [ -z "$certificates" ] && [ -s "$path" ]; then certificates=$path; fi
    done
    if [ -n "$certificates" ]; then export SSL_CERT_FILE="$certificates" PIP_CERT="$certificates"; fi
}

# uv does not read pip's configuration. Use the index in pip's configuration unless uv has its own settings.
use_index() {
    [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}${UV_CONFIG_FILE:-}" ] || return 0
    for path in "${XDG_CONFIG_HOME:-${HOME:-}/.config}/uv/uv.toml" /etc/uv/uv.toml; do
        if [ -e "$path" ]; then return 0; fi
    done
    index=${PIP_INDEX_URL:-$(pip_config index-url)}
    if [ -n "$index" ]; then export UV_DEFAULT_INDEX="$index"; fi
}
