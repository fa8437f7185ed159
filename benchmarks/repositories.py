"""Works on big repositories: ``latest()`` among many epochs, prune and gc. ckptstore alone knows these."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np

import ckptstore
from benchmarks.process import measured
from benchmarks.rivals.base import Place
from benchmarks.samples import Job, Sample
from ckptstore import keys
from ckptstore.manifest import decode_manifest, encode_manifest
from ckptstore.stores import OpLog

PAGE = 1000  # keys in a page of an S3 listing
ABOUT = "`repo.latest()`, `repo.prune(KeepLast(3))`, `repo.gc(grace=0)`"


def latest(job: Job) -> Sample:
    """``latest()`` among ``job.mib`` epochs, in a repository that was just opened."""
    epochs = job.mib
    _many_manifests(job.place, epochs)
    log = OpLog()
    with job.place.open(on_request=log) as repo:
        log.clear()
        cost = measured(repo.latest)
        if cost.result is None or cost.result.epoch != epochs:
            raise AssertionError(f"latest() found {cost.result}, not epoch {epochs}")
        pages = -(-epochs // PAGE) - 1 if job.place.remote else 0
        found = {"verbs": log.count(), "pages beyond the first": pages, "epochs": epochs}
        return _sample(job, cost, found)


def big(job: Job) -> Sample:
    """Prune a repository of ``job.mib`` epochs to three, or collect the debris of as many deleted ones."""
    log = OpLog()
    with job.place.open(on_request=log) as repo:
        for epoch in range(1, job.mib + 1):
            repo.save(epoch, {"model": {"w": np.full(1024, epoch, np.float32)}})
        if job.work == "gc":
            for prefix in _manifests(job.place)[:-3]:
                repo.store.delete(prefix)
        log.clear()
        cost = measured(lambda: _clean(repo, job.work))
        if len(repo.epochs()) != 3:
            raise AssertionError(f"{job.work} left the epochs {repo.epochs()}")
        return _sample(job, cost, {"verbs": log.count(), "epochs": job.mib})


def _clean(repo: ckptstore.Repository, work: str) -> Any:
    return repo.prune(ckptstore.KeepLast(3)) if work == "prune" else repo.gc(grace=0)


def _manifests(place: Place) -> list[str]:
    with place.open() as repo:
        return sorted(info.key for info in repo.store.list("manifests/"))


def _many_manifests(place: Place, epochs: int) -> None:
    """A repository with that many epochs: one is saved, the others are manifests of the same records.

    They are put straight where they belong, as copying a repository would: ten thousand synced saves would
    measure the disk for minutes before anything is asked.
    """
    with place.open() as repo:
        saved = repo.save(1, {"model": {"w": np.arange(1024, dtype=np.float32)}})
        first = keys.manifest_key(saved.epoch, saved.generation)
        manifest = decode_manifest(repo.store.get(first), first)

        def bodies() -> Iterator[tuple[str, bytes]]:
            for epoch in range(2, epochs + 1):
                yield keys.manifest_key(epoch, 1), encode_manifest(msgspec.structs.replace(manifest, epoch=epoch))

        if place.remote:
            with ThreadPoolExecutor(16) as pool:
                list(pool.map(lambda item: repo.store.put(*item), bodies()))
        else:
            for key, body in bodies():
                with open(os.path.join(place.path, key), "xb") as file:
                    file.write(body)


def _sample(job: Job, cost: Any, found: Mapping[str, float]) -> Sample:
    return Sample(
        work=job.work, where=job.place.where, state=job.state, mib=job.mib, rival=job.rival, round=job.round,
        durable=True, seconds=cost.seconds, cpu=cost.cpu, peak=cost.peak, nbytes=0,
        requests=cost.requests if job.place.remote and cost.requests >= found["verbs"] else None, facts=dict(found),
    )  # fmt: skip
