"""What gRPC is given of this process's certificates: a server takes up renewed ones by itself, a channel cannot."""

from __future__ import annotations

from typing import Any

import grpc

from whale_nebula.security import Credentials, CurrentCredentials


def server_credentials(current: CurrentCredentials) -> Any:
    """For a listener: who dials must show a certificate; each handshake uses the certificate of that moment."""
    used = current()

    def fetch() -> Any:
        nonlocal used
        found = current()
        if found is used:
            return None
        used = found
        return _configuration(found)

    return grpc.dynamic_ssl_server_credentials(_configuration(used), fetch, require_client_authentication=True)


def _configuration(credentials: Credentials) -> Any:
    pair = (credentials.key_pem, credentials.cert_pem)
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=credentials.ca_pem)


def channel_credentials(credentials: Credentials) -> Any:
    """For one channel: it keeps these as long as it lives."""
    return grpc.ssl_channel_credentials(credentials.ca_pem, credentials.key_pem, credentials.cert_pem)
