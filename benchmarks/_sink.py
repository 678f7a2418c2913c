"""A store with the interface of S3 that keeps only the sizes of large objects: `python benchmarks/_sink.py`.

It replaces a store on other machines, so it does as little work as possible. It prints its port, and at the
end of its stdin the received bytes and its own CPU seconds.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

# Objects up to this size are kept: manifests and lists.
_KEPT = 1 << 20
_TIME = "2026-01-01T00:00:00.000Z"


class Sink:
    """The objects: their sizes, and the contents of small ones."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.sizes: dict[str, int] = {}
        self.contents: dict[str, bytes] = {}
        self.uploads: dict[str, int] = {}
        self.numbers = itertools.count(1)
        self.received = 0

    def put(self, name: str, size: int, content: bytes = b"") -> None:
        """Keep an object."""
        with self.lock:
            self.sizes[name] = size
            self.contents[name] = content

    def listing(self, prefix: str, delimiter: str) -> str:
        """Return the answer to a request for names."""
        objects, folders = [], set()
        with self.lock:
            for name, size in sorted(self.sizes.items()):
                below_prefix = name[len(prefix) :]
                if not name.startswith(prefix):
                    continue
                if delimiter and delimiter in below_prefix:
                    folders.add(prefix + below_prefix.partition(delimiter)[0] + delimiter)
                else:
                    objects.append(
                        f"<Contents><Key>{escape(name)}</Key><Size>{size}</Size><ETag>&quot;e&quot;</ETag>"
                        f"<LastModified>{_TIME}</LastModified></Contents>"
                    )
        prefixes = [f"<CommonPrefixes><Prefix>{escape(f)}</Prefix></CommonPrefixes>" for f in sorted(folders)]
        return "".join(
            ["<ListBucketResult><IsTruncated>false</IsTruncated>", *objects, *prefixes, "</ListBucketResult>"]
        )


class Handler(BaseHTTPRequestHandler):
    """Answers requests of S3 for one bucket."""

    protocol_version = "HTTP/1.1"
    sink: Sink

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        name = unquote(parts.path).lstrip("/").partition("/")[2]
        query = {key: values[0] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
        body, size = self._body()
        sink = self.sink
        if self.command == "PUT":
            sink.received += size
            if "uploadId" in query:
                with sink.lock:
                    sink.uploads[query["uploadId"]] += size
            else:
                sink.put(name, size, body)
            self._answer(200, b"", ETag='"e"')
        elif self.command == "POST" and "uploads" in query:
            with sink.lock:
                upload = str(next(sink.numbers))
                sink.uploads[upload] = 0
            self._xml(
                "<InitiateMultipartUploadResult><Bucket>b</Bucket>"
                f"<Key>{escape(name)}</Key><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            )
        elif self.command == "POST" and "uploadId" in query:
            sink.put(name, sink.uploads.pop(query["uploadId"]))
            self._xml(
                "<CompleteMultipartUploadResult><ETag>&quot;e&quot;</ETag></CompleteMultipartUploadResult>"
            )
        elif self.command in ("GET", "HEAD") and "list-type" in query:
            self._xml(sink.listing(query.get("prefix", ""), query.get("delimiter", "")))
        elif self.command in ("GET", "HEAD") and name in sink.sizes:
            content = sink.contents[name]
            self._answer(
                200, content, sink.sizes[name], ETag='"e"', Last_Modified="Thu, 01 Jan 2026 00:00:00 GMT"
            )
        else:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    do_GET = do_HEAD = do_PUT = do_POST = _serve

    def _body(self) -> tuple[bytes, int]:
        size = remaining = int(self.headers.get("Content-Length") or 0)
        if size <= _KEPT:
            return self.rfile.read(size), size
        memory = memoryview(bytearray(_KEPT))
        while remaining:
            remaining -= self.rfile.readinto(memory[: min(remaining, _KEPT)])  # type: ignore[attr-defined]
        return b"", size

    def _xml(self, text: str) -> None:
        self._answer(200, b'<?xml version="1.0" encoding="UTF-8"?>' + text.encode())

    def _answer(self, status: int, content: bytes, size: int | None = None, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content) if size is None else size))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        """Write no line for each request."""


def main() -> None:
    """Serve until stdin ends."""
    Handler.sink = Sink()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(server.server_port, flush=True)
        sys.stdin.read()
        print(json.dumps({"bytes": Handler.sink.received, "cpu": time.process_time()}), flush=True)
        server.shutdown()


if __name__ == "__main__":
    main()
