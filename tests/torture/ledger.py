"""What was begun and what was reported as committed in one repository, compared with what is there."""

from __future__ import annotations

import time

from ckptstore import CkptStoreError, EpochNotFoundError, Repository, RepositoryNotFoundError
from ckptstore.stores.base import Store
from tests.repository.helpers import assert_no_debris
from tests.torture.content import CHUNK, what_differs
from tests.torture.work import Work


class Ledger:
    """The books of one repository, whose writers keep the last ``keep`` epochs.

    Attributes:
        begun: what was ever begun: (epoch, version).
        done: epoch → the last version that was reported as committed, of those that should still be there.
    """

    def __init__(self, work: Work, store: Store, keep: int) -> None:
        self._work = work
        self._store = store
        self._keep = keep
        self.begun: set[tuple[int, int]] = set()
        self.done: dict[int, int] = {}

    def fresh(self) -> Repository | None:
        """A repository that remembers nothing; None if there is none yet."""
        return fresh(self._store)

    def commit(self, epoch: int, version: int) -> None:
        """A save was reported as committed."""
        self.done[epoch] = version
        self._work.count(committed=1)

    def refuse(self, error: str) -> None:
        """A save ended in an error of ours."""
        self._work.count(refused=1)
        self._work.note(f"refused: {error}")

    def look(self, step: str) -> tuple[Repository, set[int]] | None:
        """With fresh eyes: load every epoch. What was looked with and what is there; None where nothing can be read."""
        repo = self.fresh()
        if repo is None:
            if self.done:
                self._work.blame("lost", step, "the repository has gone")
            return None
        try:
            epochs = set(repo.epochs())
            for epoch in sorted(epochs):
                if not self._check(step, repo, epoch):
                    epochs.remove(epoch)
            latest = repo.latest()
        except CkptStoreError as error:
            self._work.blame("other", step, f"the look failed: {error!r}")
            return None
        if (latest.epoch if latest is not None else None) != max(epochs, default=None) or (latest and latest.skipped):
            self._work.blame("other", step, f"latest is {latest}, of {sorted(epochs)}")
        for epoch in sorted(epochs | self.done.keys())[-self._keep :] if self._keep else ():
            if epoch not in epochs:
                self._work.blame("lost", step, f"epoch {epoch} was committed and is gone; there are {sorted(epochs)}")
        self.done = {epoch: version for epoch, version in self.done.items() if epoch in epochs}
        return repo, epochs

    def _check(self, step: str, repo: Repository, epoch: int) -> bool:
        """Whether the epoch is there: on S3 a request of the dead may go on for a moment and remove what was listed."""
        reported = self.done.get(epoch)
        try:
            checkpoint = repo.checkpoint(epoch)
            version = checkpoint.metadata["version"]
            wrong = what_differs(checkpoint.load(), epoch, version)
        except CkptStoreError as error:
            if isinstance(error, EpochNotFoundError) and epoch not in repo.epochs():
                return False
            self._work.blame(
                "phantom" if reported is None else "lost",
                step,
                f"epoch {epoch} is visible and does not load: {error!r}",
            )
            return True
        self._work.count(checked=1)
        if wrong:
            self._work.blame("lost", step, f"epoch {epoch} loads other bits: {wrong}")
        elif (epoch, version) not in self.begun:
            self._work.blame("phantom", step, f"epoch {epoch}, version {version} was never begun")
        elif reported is not None and version < reported:
            self._work.blame("lost", step, f"epoch {epoch} has version {version}, reported was {reported}")
        return True

    def sweep(self, step: str) -> None:
        """What the dead and the failed have left can be removed, and all epochs are as before. No save may run."""
        repo = self.fresh()
        if repo is None:
            return
        for last in (False, False, True):  # a put that was under way on S3 when its sender was killed may land late
            try:
                repo.gc(grace=0)
                assert_no_debris(self._store)
                break
            except AssertionError as error:
                if last:
                    self._work.blame("other", step, f"gc leaves debris: {str(error)[:500]}")
                time.sleep(0.5)
            except CkptStoreError as error:
                self._work.blame("other", step, f"gc failed: {error!r}")
                break
        self.look(f"{step}, after gc")


def fresh(store: Store) -> Repository | None:
    """A repository that remembers nothing; None if there is none yet."""
    try:
        return Repository(store, create=False, chunk_size=CHUNK)
    except RepositoryNotFoundError:
        return None
