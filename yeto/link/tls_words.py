"""What the failures of TLS mean, in our words and with the flag that mends them.

OpenSSL says what went wrong in the terms of its own; who reads it has a syncer or a learner with flags. The
side that does not accept a certificate knows why exactly, the other one knows it from the alert it was sent.
"""

from __future__ import annotations

import ssl
from typing import Final

_NO_TLS: Final = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "BAD_RECORD_TYPE")
"""How OpenSSL, in its several versions, calls bytes that are no TLS."""

_SYNCER_SAYS: Final = (
    (_NO_TLS, "it does not speak TLS; give every learner --tls-ca"),
    (("UNSUPPORTED_PROTOCOL",), "it does not speak TLS 1.3"),
    (("DID_NOT_RETURN_A_CERTIFICATE",), "it has no client certificate; give it --tls-cert and --tls-key"),
    (("UNKNOWN_CA",), "it does not accept this syncer's certificate, which its --tls-ca did not sign"),
    (("CERTIFICATE_EXPIRED",), "it does not accept this syncer's certificate, which has expired for it"),
    (
        ("BAD_CERTIFICATE", "CERTIFICATE_UNKNOWN"),
        "it does not accept this syncer's certificate: another name than it dialled, or not valid yet",
    ),
)
_LEARNER_SAYS: Final = (
    (
        _NO_TLS,
        "it does not speak TLS; start the syncer with --tls-cert and --tls-key, or leave out --tls-ca here",
    ),
    (("PROTOCOL_VERSION",), "it does not speak TLS 1.3"),
    (("CERTIFICATE_REQUIRED",), "the syncer demands a client certificate; give --tls-cert and --tls-key"),
    (
        ("UNKNOWN_CA", "BAD_CERTIFICATE", "CERTIFICATE_UNKNOWN"),
        "the syncer does not accept this learner's certificate; its --tls-client-ca must have signed it",
    ),
    (
        ("CERTIFICATE_EXPIRED",),
        "the syncer does not accept this learner's certificate, which has expired; give a new --tls-cert",
    ),
)
"""What each side makes of a reason that OpenSSL gives: of what it saw itself, and of the other's alerts."""

_VERIFIED_BY_LEARNER: Final = {
    9: "check the clocks of both machines",
    10: "give the syncer a new --tls-cert",
    62: "give --tls-server-name the name that it is for, or the syncer a certificate for this host",
    64: "give --tls-server-name the name that it is for, or the syncer a certificate for this host",
}
"""Remedies by X509_V_ERR number: not valid yet, expired, another host name, another address."""


def openssl_words(error: ssl.SSLError) -> str:
    """Return OpenSSL's reason in small letters; "pem lib" is what it calls text that is not PEM."""
    return (getattr(error, "reason", None) or str(error)).replace("_", " ").lower()


def explain(error: ssl.SSLError, *, server_side: bool) -> str | None:
    """Return in our words why one side does not take the other's TLS; None when it is not about that."""
    if isinstance(error, ssl.SSLCertVerificationError):
        why = error.verify_message.rstrip(".")
        if server_side:
            return f"its certificate is not accepted: {why}; --tls-client-ca must have signed it"
        remedy = _VERIFIED_BY_LEARNER.get(error.verify_code, "--tls-ca must hold the CA that signed it")
        return f"the syncer's certificate is not accepted: {why}; {remedy}"
    said = getattr(error, "reason", None) or ""
    for reasons, text in _SYNCER_SAYS if server_side else _LEARNER_SAYS:
        if any(reason in said for reason in reasons):
            return text
    return None
