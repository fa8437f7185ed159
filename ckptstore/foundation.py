"""What a repository stands on: its marker, and a store that has been asked what it can do."""

from __future__ import annotations

import uuid
from datetime import datetime, timezone

from ckptstore import keys
from ckptstore.catalog import Catalog
from ckptstore.errors import (
    CorruptionError,
    FormatError,
    ObjectExistsError,
    ObjectNotFoundError,
    RepositoryNotFoundError,
)
from ckptstore.manifest import MAX_MARKER, Marker, decode_marker, encode_signed, writer_version
from ckptstore.reader import sure
from ckptstore.stores import probe_conditional_put


class Foundation:
    """Finds the repository, or makes it if there is none (and ``create``): now, or when something is to be written.

    Raises:
        RepositoryNotFoundError: there is none, and ``create`` is False.
        FormatError: the place holds something else, or its server has no conditional puts.
    """

    def __init__(
        self,
        catalog: Catalog,
        *,
        create: bool,
        unsafe_single_writer: bool,
        known: str | None = None,
        later: bool = False,
    ) -> None:
        """``known``: the id of a repository that is there: the store is not asked. ``later``: it is not made yet."""
        self._catalog = catalog
        self._store = catalog.store
        self._unsafe = unsafe_single_writer
        self._may_write = False
        self._to_make = False
        if known is not None:
            self.id = known
            return
        marker = catalog.marker()
        if marker is None and not create:
            raise RepositoryNotFoundError(
                f"there is no repository at {self._url}: check the URL, or open it with create=True"
            )
        self._to_make = marker is None and later
        if marker is None and not later:
            marker = self._create()
        self.id = uuid.uuid4().hex if marker is None else marker.repository
        """32 hexadecimal digits that name the repository."""

    @property
    def _url(self) -> str:
        return self._store.traits.url

    def require(self, *, restore: bool = False) -> None:
        """The repository is still there; if only its marker was lost, ``restore`` puts it back, or makes it now.

        Raises:
            RepositoryNotFoundError: it has vanished.
            FormatError: it is to be made, and something else is in its place.
        """
        if self._to_make:
            if restore:
                self.settle()
            return
        try:
            self._store.info(keys.MARKER)
        except ObjectNotFoundError:
            marker = self._catalog.marker()
            if marker is None or marker.repository != self.id:
                raise RepositoryNotFoundError(
                    f"the repository at {self._url} has vanished: is the mount or bucket still there?"
                ) from None
            if restore:
                self._store.put(keys.MARKER, encode_signed(marker), if_absent=True)

    def settle(self) -> None:
        """Make the repository, if that is still to be done: it is to be written to, or named to another process."""
        if self._to_make:
            self.id = (self._catalog.marker() or self._create()).repository
            self._to_make = False

    def mend_marker(self, dry_run: bool) -> str | None:
        """Put a marker that cannot be read back as the manifests tell it. What was wrong; None if nothing was."""
        try:
            sure(lambda: decode_marker(self._store.get(keys.MARKER, 0, MAX_MARKER + 1)))
        except ObjectNotFoundError:
            return None  # that is for ``require``
        except CorruptionError as error:
            marker = self._catalog.marker()
            if marker is None or marker.repository != self.id:
                raise
            if not dry_run:
                self._store.put(keys.MARKER, encode_signed(marker))
            return error.message
        return None

    def _create(self) -> Marker:
        """Make the repository. Refuses a place that holds something else."""
        for info in self._store.list():
            if not keys.is_ours(info.key):
                raise FormatError(
                    f"{self._url} is no repository and holds something else ({info.key}): choose an empty place",
                    key=info.key,
                )
        self.prepare_to_write()
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        marker = Marker(repository=uuid.uuid4().hex, created=now, writer=writer_version())
        try:
            self._store.put(keys.MARKER, encode_signed(marker), if_absent=True)
        except ObjectExistsError:
            found = self._catalog.marker()  # another process made it in the same moment
            assert found is not None
            return found
        return marker

    def prepare_to_write(self) -> None:
        """Before the first write: is create-only really create-only here? Some servers accept and ignore it."""
        if self._may_write:
            return
        if not self._unsafe and self._store.traits.conditional_put is None and not probe_conditional_put(self._store):
            raise FormatError(
                f"{self._url}: this server accepts conditional puts but ignores them, so two writers could overwrite "
                "each other's commit. Use another server, or pass unsafe_single_writer=True if there is only one writer"
            )
        self._may_write = True
