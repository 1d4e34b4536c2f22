"""Reading a request's body: bounded in size, plain or gzip, parsed straight into a wire model."""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import dataclass
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request

T = TypeVar("T")

_GZIP_MEMBERS = 8
"""Most parts that a gzip body may be joined of: each costs a pass over what is left of the body."""
_LARGE_BYTES = 1 << 20
"""Gzip bodies from this size on are decompressed beside the event loop."""


class BadBody(Exception):
    """A body that is refused.

    Args:
        status: HTTP status, 4xx.
        detail: what was wrong, JSON-serialisable.
    """

    def __init__(self, status: int, detail: object) -> None:
        super().__init__(str(detail))
        self.status = status
        self.detail = detail


@dataclass
class Arriving:
    """Bodies that are being read, all together.

    Attributes:
        most_bytes: that they may hold.
        bytes: that they hold now.
    """

    most_bytes: int
    bytes: int = 0


async def read_body(request: Request, limit: int, arriving: Arriving) -> bytes:
    """The decoded body.

    Args:
        request: the request; ``Content-Encoding`` may be gzip.
        limit: most bytes, before and after decoding.
        arriving: the server's bodies that are being read; this one is counted while it is.

    Raises:
        BadBody: too large (413), too much at once (429), unknown encoding (415), broken gzip (400).
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip", ""):
        raise BadBody(415, f"content-encoding {encoding!r} is not understood; send gzip or none")
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            arriving.bytes += len(chunk)
            if size > limit:
                raise BadBody(413, f"the body is larger than {limit} bytes")
            if arriving.bytes > arriving.most_bytes:
                raise BadBody(
                    429, f"bodies of more than {arriving.most_bytes} bytes arrive at once; send it again"
                )
            chunks.append(chunk)
        raw = b"".join(chunks)
        if encoding != "gzip" or not raw:
            return raw
        if len(raw) < _LARGE_BYTES:
            return _gunzip(raw, limit)
        return await asyncio.to_thread(_gunzip, raw, limit)
    finally:
        arriving.bytes -= size


def _gunzip(raw: bytes, limit: int) -> bytes:
    parts: list[bytes] = []
    left = limit
    for _ in range(_GZIP_MEMBERS):
        if not raw:
            break
        stream = zlib.decompressobj(16 + zlib.MAX_WBITS)
        try:
            parts.append(stream.decompress(raw, left + 1))
        except zlib.error as error:
            raise BadBody(400, f"the body is not valid gzip: {error}") from None
        left -= len(parts[-1])
        if left < 0:
            raise BadBody(413, f"the body is larger than {limit} bytes once decompressed")
        if not stream.eof:
            raise BadBody(400, "the body is not valid gzip: it ends too early")
        raw = stream.unused_data
    if raw:
        raise BadBody(400, f"the body is joined of more than {_GZIP_MEMBERS} gzip members; send one")
    return b"".join(parts)


def parse(adapter: TypeAdapter[T], body: bytes) -> T:
    """The body as a wire model.

    Raises:
        BadBody: 422, with the first ten findings (place and message, never the input).
    """
    try:
        return adapter.validate_json(body)
    except ValidationError as error:
        findings = error.errors(include_url=False, include_input=False, include_context=False)
        raise BadBody(422, [_printable(finding) for finding in findings[:10]]) from None


def _printable(finding: object) -> object:
    # Places hold keys of the sender's choosing: lone surrogates would break the answer's encoding.
    if isinstance(finding, dict):
        return {key: _printable(value) for key, value in finding.items()}
    if isinstance(finding, list | tuple):
        return [_printable(value) for value in finding]
    if isinstance(finding, str):
        return finding[:500].encode("utf-8", "replace").decode("utf-8")
    return finding
