"""What the proxy reads off the wire: HTTP/1.1 heads and replies, and what a request of S3 or GCS asks for."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Seen:
    """One request, and what became of it.

    Attributes:
        verb: "put", "create" (a put on the condition that there is none), "get", "info", "list", "delete",
            "bulk-delete", "multipart", "copy" or "other".
        key: the whole object name, without the bucket; of a listing its prefix.
        headers: names in lower case.
        at: seconds of the monotonic clock.
        size: bytes of the body.
        rule: what acted on it, "" when it passed untouched.
        status: of the reply that was sent, None for none.
    """

    method: str
    target: str
    headers: dict[str, str]
    verb: str
    key: str
    at: float
    size: int = 0
    rule: str = ""
    status: int | None = None

    @property
    def query(self) -> dict[str, str]:
        return dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.target).query, keep_blank_values=True))


@dataclass(frozen=True)
class Reply:
    """A whole reply; its Content-Length is computed unless ``announce`` says otherwise."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    announce: int | None = None


def abort(writer: asyncio.StreamWriter) -> None:
    """End a connection by RST."""
    found: socket.socket | None = writer.get_extra_info("socket")
    if found is not None and not writer.transport.is_closing():
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def parse_head(head: bytes) -> tuple[tuple[str, str], dict[str, str]]:
    """The first two words of the first line, and the headers with names in lower case."""
    first, *lines = head.decode("latin-1").split("\r\n")
    one, two, *_ = first.split(" ")
    named = (line.split(":", 1) for line in lines if ":" in line)
    return (one, two), {name.strip().lower(): value.strip() for name, value in named}


async def read_reply(reader: asyncio.StreamReader, method: str) -> Reply:
    """The whole reply of a server."""
    head = await reader.readuntil(b"\r\n\r\n")
    (_, status), headers = parse_head(head)
    length = headers.pop("content-length", None)
    framing = headers.pop("transfer-encoding", "")
    headers.pop("connection", None)
    if method == "HEAD" or status in ("204", "304"):
        return Reply(int(status), b"", headers, int(length or 0))
    if "chunked" in framing:
        body = bytearray()
        while size := int((await reader.readline()).split(b";")[0], 16):
            body += await reader.readexactly(size)
            await reader.readexactly(2)
    else:
        body = bytearray(await (reader.read() if length is None else reader.readexactly(int(length))))
    return Reply(int(status), bytes(body), headers)


def classify(method: str, target: str, headers: Mapping[str, str], body: bytes) -> tuple[str, str]:
    """Verb and key of a request of S3 (path style, or with the bucket in the host) or Google Cloud Storage."""
    url = urllib.parse.urlsplit(target)
    query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
    gcs = re.fullmatch(r"(/upload|/download)?/storage/v1/b(?:/[^/]*(?:/o(?:/(.*))?)?)?", url.path)
    if gcs:
        name = re.search(rb'"name": ?"([^"]*)"', body)
        key = urllib.parse.unquote(gcs[2] or (name[1].decode() if name else query.get("prefix", "")))
        return _gcs_verb(method, bool(gcs[1] == "/upload"), bool(gcs[2]), query), key
    path_style = re.match(r"[\d.]+(:\d+)?$|localhost(:\d+)?$", headers.get("host", ""))
    key = url.path.lstrip("/")
    key = urllib.parse.unquote(key.partition("/")[2] if path_style else key)
    return _s3_verb(method, key, query, headers), key or query.get("prefix", "")


def _gcs_verb(method: str, upload: bool, named: bool, query: Mapping[str, str]) -> str:
    if upload:
        if query.get("uploadType") != "multipart":
            return "multipart"
        return "create" if query.get("ifGenerationMatch") == "0" else "put"
    if method == "GET":
        return ("get" if query.get("alt") == "media" else "info") if named else "list"
    return {"DELETE": "delete"}.get(method, "copy" if "/rewriteTo/" in str(query) else "other")


def _s3_verb(method: str, key: str, query: Mapping[str, str], headers: Mapping[str, str]) -> str:
    if {"uploads", "uploadId", "partNumber"} & set(query):
        return "multipart"
    if "x-amz-copy-source" in headers:
        return "copy"
    if method == "POST":
        return "bulk-delete" if "delete" in query else "other"
    if method == "PUT":
        return "create" if headers.get("if-none-match") == "*" else "put"
    if not key:
        return "list" if method == "GET" else "other"
    return {"GET": "get", "HEAD": "info", "DELETE": "delete"}.get(method, "other")
