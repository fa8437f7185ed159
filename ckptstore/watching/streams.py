"""A file's bytes from front to back, plain or out of gzip, in bounded memory. Nothing is mapped: a trainer that cuts
a file short would end us with SIGBUS."""

from __future__ import annotations

import zlib

from ckptstore.errors import InvalidRecordError
from ckptstore.files import FileSource

BLOCK = 1 << 20


class TornError(Exception):
    """The file is no whole one. The message says why."""


class Stream:
    """Plain bytes of a file."""

    def __init__(self, source: FileSource) -> None:
        self._source = source
        self._at = 0  # of what has not been read from the file
        self._buffer = memoryview(b"")
        self.position = 0
        """Bytes that have been taken or skipped."""

    def peek(self, count: int) -> memoryview:
        """The next ``count`` bytes, or all that are left."""
        while len(self._buffer) < count:
            block = self._block()
            if not block:
                break
            self._buffer = memoryview(bytes(self._buffer) + block if self._buffer else block)
        return self._buffer[:count]

    def take(self, count: int) -> memoryview:
        """The next ``count`` bytes. TornError if there are not so many."""
        found = self.peek(count)
        if len(found) < count:
            raise TornError("it ends in the middle")
        self._buffer = self._buffer[count:]
        self.position += count
        return found

    def skip(self, count: int) -> None:
        """Pass over ``count`` bytes. TornError if there are not so many."""
        self.position += count
        held = min(count, len(self._buffer))
        self._buffer = self._buffer[held:]
        self._pass_over(count - held)

    def drain(self) -> int:
        """Read to the end; how many bytes there were in all. TornError if what wraps them is damaged."""
        while block := self.peek(1) and self.peek(len(self._buffer)):
            self.position += len(block)
            self._buffer = self._buffer[len(block) :]
        return self.position

    def _block(self) -> bytes:
        stop = min(self._at + BLOCK, self._source.nbytes)
        block = self._read(self._at, stop)
        self._at = stop
        return block

    def _read(self, start: int, stop: int) -> bytes:
        if start == stop:
            return b""
        try:
            return bytes(self._source.read(start, stop))
        except InvalidRecordError as error:  # cut short, or gone
            raise TornError("it changed while it was looked at") from error

    def _pass_over(self, count: int) -> None:
        self._at += count
        if self._at > self._source.nbytes:
            raise TornError("it ends in the middle")


class Gunzip(Stream):
    """What gzip holds: any number of members, each proved by its checksum and length."""

    def __init__(self, source: FileSource) -> None:
        super().__init__(source)
        self._inner = zlib.decompressobj(wbits=31)
        self._rest = b""
        self._over = False

    def _block(self) -> bytes:
        while not self._over:
            if self._inner.eof:
                self._rest = self._inner.unused_data
                if not self._rest:
                    self._rest = super()._block()
                if not self._rest:
                    self._over = True
                    break
                self._inner = zlib.decompressobj(wbits=31)
            given = self._rest or super()._block()
            if not given:
                raise TornError("its gzip ends in the middle")
            try:
                block = self._inner.decompress(given, BLOCK)
            except zlib.error as error:
                raise TornError(f"its gzip is damaged ({error})") from error
            self._rest = self._inner.unconsumed_tail
            if block:
                return block
        return b""

    def _pass_over(self, count: int) -> None:
        while count > 0:
            block = self._block()
            if not block:
                raise TornError("it ends in the middle")
            if len(block) > count:
                self._buffer = memoryview(block)[count:]
            count -= len(block)
