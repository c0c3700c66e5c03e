"""A certificate authority of the tests' own: certificates as files, good ones and every kind of bad ones."""

import datetime
import itertools

import trustme

from yeto.link import client_context, server_context

DAY = datetime.timedelta(days=1)


def now():
    return datetime.datetime.now(datetime.UTC)


class Authority:
    """Signs what it is asked to sign, and writes it into a folder."""

    def __init__(self, folder):
        self._folder = folder
        self._numbers = itertools.count()
        self._ca = trustme.CA()
        self.path = folder / f"ca-{id(self)}.pem"
        self._ca.cert_pem.write_to_path(str(self.path))

    def sign(self, *names, **validity):
        """Return the paths of a new certificate and its key, readable by its owner alone."""
        made = self._ca.issue_cert(*names, **validity)
        number = next(self._numbers)
        cert, key = (self._folder / f"{what}-{id(self)}-{number}.pem" for what in ("cert", "key"))
        for path in (cert, key):
            path.touch(mode=0o600)
        cert.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
        key.write_bytes(made.private_key_pem.bytes())
        return cert, key

    def expired(self, *names):
        return self.sign(*names, not_before=now() - 3 * DAY, not_after=now() - DAY)

    def future(self, *names):
        return self.sign(*names, not_before=now() + DAY, not_after=now() + 3 * DAY)

    def server(self, *names, client_ca=None):
        """Return a syncer's context; clients must have a certificate of ``client_ca``."""
        cert, key = self.sign(*names or ("localhost", "127.0.0.1"))
        return server_context(cert, key, None if client_ca is None else client_ca.path)

    def client(self, pair=(None, None)):
        """Return a learner's context that trusts this authority and shows a certificate, if there is one."""
        return client_context(self.path, *pair)
