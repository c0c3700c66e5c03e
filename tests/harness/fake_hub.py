"""A server on this machine that stands in for the Hugging Face hub, and the faults it can be told to have.

It answers what the hub's client asks when it loads a model or a data set: which commit a branch is, which
files there are, and the files, whole or from a byte on. Faults are declared for a path, used up one by one,
and counted.
"""

import hashlib
import json
import threading
from collections import Counter
from contextlib import contextmanager
from urllib.parse import parse_qs, unquote, urlsplit

from http_serving import Handler, serving

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Repositories by name, each a mapping from path to bytes, and what is to go wrong."""

    def __init__(self, models=None, datasets=None):
        self.models = models or {}
        self.datasets = datasets or {}
        self.faults = {}
        """By path of a file (``HEAD path``, ``info``): what to do to its next requests, in this order.

        A number answers with that status; ``("cut", n)`` sends n bytes of the body and closes;
        ``("stall", n)`` sends n bytes and then nothing until the server ends.
        """
        self.asked = Counter()
        """Requests by method and path."""
        self.ranges = []
        """What was asked for from a byte on: pairs of path and header."""
        self.over = threading.Event()

    @contextmanager
    def served(self):
        """Serve; give the address."""
        asked = type("Asked", (_Asked,), {"hub": self})
        with serving(asked) as url:
            try:
                yield url
            finally:
                self.over.set()

    def fault(self, path):
        waiting = self.faults.get(path)
        return waiting.pop(0) if waiting else None


class _Asked(Handler):
    protocol_version = "HTTP/1.1"
    hub = None

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        self._answer()

    def do_POST(self):
        size = int(self.headers.get("Content-Length", 0))
        self._answer(self.rfile.read(size))

    def _answer(self, body=b""):
        address = urlsplit(self.path)
        path = unquote(address.path).strip("/")
        self.hub.asked[f"{self.command} {path}"] += 1
        repositories = self.hub.models
        parts = path.split("/")
        if parts[0] == "api":
            parts = parts[1:]
            if parts[:1] == ["datasets"]:
                repositories = self.hub.datasets
            name, rest = "/".join(parts[1:3]), parts[3:]
            files = repositories.get(name)
            if parts[:1] not in (["models"], ["datasets"]):
                return self._say(404, b"{}")
            if files is None:
                return self._say(401, b"{}", {"X-Error-Code": "RepoNotFound"})
            return self._api(name, files, rest, parse_qs(address.query), body)
        if parts[:1] == ["datasets"]:
            repositories, parts = self.hub.datasets, parts[1:]
        name, rest = "/".join(parts[:2]), parts[2:]
        files = repositories.get(name)
        if files is None or rest[:1] != ["resolve"]:
            return self._say(404, b"", {"X-Error-Code": "RepoNotFound"})
        return self._file("/".join(rest[2:]), files)

    def _api(self, name, files, rest, query, body):
        fault = self.hub.fault("info")
        if isinstance(fault, int):
            return self._say(fault, b"{}", {"Retry-After": "0"})
        if rest[:1] == ["tree"]:
            return self._tree(files, "/".join(rest[2:]), recursive="recursive" in query)
        if rest[:1] == ["paths-info"]:
            wanted = parse_qs(body.decode()).get("paths") or json.loads(body or b"{}").get("paths", [])
            return self._json([_entry(path, files[path]) for path in wanted if path in files])
        if rest[:1] not in ([], ["revision"]):
            return self._say(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        if rest[1:] and unquote(rest[1]) not in ("main", COMMIT):
            return self._say(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        facts = {"id": name, "sha": COMMIT, "private": False, "gated": False, "disabled": False, "tags": []}
        return self._json(facts | {"siblings": [{"rfilename": path} for path in files]})

    def _tree(self, files, folder, *, recursive):
        before = f"{folder}/" if folder else ""
        inside = {path: path.removeprefix(before) for path in files if path.startswith(before)}
        if not inside:
            return self._say(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        folders = {before + rest.split("/")[0] for rest in inside.values() if "/" in rest}
        shown = [path for path, rest in inside.items() if recursive or "/" not in rest]
        listed = [{"type": "directory", "path": path, "oid": COMMIT} for path in sorted(folders)]
        return self._json(listed + [_entry(path, files[path]) for path in shown])

    def _file(self, path, files):
        if path not in files:
            return self._say(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        content = files[path]
        fault = self.hub.fault(path if self.command == "GET" else f"HEAD {path}")
        if isinstance(fault, int):
            return self._say(fault, b"", {"Retry-After": "0"})
        facts = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        facts["Accept-Ranges"] = "bytes"
        start = 0
        if "Range" in self.headers:
            self.hub.ranges.append((path, self.headers["Range"]))
            start = int(self.headers["Range"].removeprefix("bytes=").split("-")[0])
            facts["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        status = 206 if start else 200
        return self._say(status, content[start:], facts, fault)

    def _json(self, value):
        self._say(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _say(self, status, body, headers=None, fault=None):
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault is None:
            self.wfile.write(body)
            return
        how, count = fault
        self.wfile.write(body[:count])
        self.wfile.flush()
        if how == "stall":
            self.hub.over.wait()
        self.close_connection = True


def _entry(path, content):
    return {
        "type": "file",
        "path": path,
        "size": len(content),
        "oid": hashlib.sha1(content).hexdigest(),
    }
