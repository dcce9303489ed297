"""TLS settings of connections to model servers."""

import ssl
from pathlib import Path

import httpx

from prorl_envs.errors import InputError

_HINT = "model.ca_file is a file of certificates in PEM format: -----BEGIN CERTIFICATE-----"


def client_tls(ca_file: Path | None = None) -> ssl.SSLContext:
    """Return the TLS settings of a client that verifies its servers.

    The machine's certificate settings are ignored, as its proxy settings are.

    Args:
        ca_file: certificates (PEM) of the trusted authorities, instead of the public ones; None trusts the
            public authorities.

    Raises:
        InputError: the file is missing, or has no certificates.
    """
    if ca_file is None:
        return httpx.create_ssl_context(trust_env=False)
    if not ca_file.is_file():  # a pipe would block
        raise InputError(f"the CA file {ca_file} is not a file", hint=_HINT)
    try:
        return ssl.create_default_context(cafile=str(ca_file))
    except ssl.SSLError as error:
        raise InputError(f"the CA file {ca_file} has no valid certificates", hint=_HINT) from error
    except OSError as error:
        raise InputError(f"the CA file {ca_file} cannot be read: {error.strerror}", hint=_HINT) from error
