"""A server on this machine that stands in for one elsewhere, for as long as a test needs it."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """What answers; it says nothing of it on stderr."""

    def log_message(self, *_):
        pass


@contextmanager
def serving(handler):
    """Answer requests by a class of handlers; give the address. Nobody is left over afterwards."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        # A test ends when its server does: that is looked for often.
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
