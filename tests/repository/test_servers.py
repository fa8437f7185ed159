"""Whole repositories on the real servers: what a store must be able to do, and GCS from end to end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import KeepLast


def test_server_that_ignores_conditions_is_refused(s3_no_conditions: Any) -> None:
    """P1: two writers could overwrite each other's commit there, so nothing is written unless the user insists."""
    url, options = s3_no_conditions.url(), s3_no_conditions.storage_options
    with pytest.raises(ckptstore.FormatError, match="unsafe_single_writer"):
        ckptstore.open(url, options)
    with pytest.raises(ckptstore.RepositoryNotFoundError):
        ckptstore.open(url, options, create=False)  # nothing was left behind

    with ckptstore.open(url, options, unsafe_single_writer=True) as repo:
        repo.save(1, {"m": np.arange(1000)})
        with pytest.raises(ckptstore.EpochExistsError):
            repo.save(1, {"m": 0})
        assert repo.verify().ok
    with ckptstore.open(url, options) as reader:  # reading is safe
        assert (reader.checkpoint(1).load("m") == np.arange(1000)).all()
        with pytest.raises(ckptstore.FormatError, match="unsafe_single_writer"):
            reader.save(2, {"m": 0})
        assert reader.epochs() == [1]


@pytest.mark.parametrize(("kind", "transport"), [("gcs", "fsspec"), ("s3", "fsspec"), ("s3", None)])
def test_life_of_a_repository(kind: str, transport: str | None, request: pytest.FixtureRequest) -> None:
    """P1-P5 on a real server: save, reuse, refuse, replace, step back, prune and gc."""
    bucket = request.getfixturevalue(kind)
    url, options = bucket.url(), bucket.storage_options
    noise = np.random.default_rng(0).random(300_000)
    with ckptstore.open(url, options, chunk_size=1 << 20, keep=KeepLast(3), transport=transport) as repo:
        for epoch in range(4):
            report = repo.save(epoch, {"frozen": noise, "step": {"n": epoch, "w": noise[:9] + epoch}}).report
            assert report is not None
            assert report.bytes_reused >= (noise.nbytes if epoch else 0)
        with pytest.raises(ckptstore.EpochExistsError):
            repo.save(3, {"frozen": noise})
        assert repo.save(3, {"step": 30}, replace=True).generation == 2
        assert repo.epochs() == [1, 2, 3]
        repo.store.delete(repo.checkpoint(3)._manifest.records[0].key)
        latest = repo.latest()
        assert latest is not None
        assert (latest.epoch, latest.skipped[0].epoch) == (2, 3)
        assert latest.load("step")["n"] == 2
        assert (latest.load("frozen") == noise).all()
        repo.delete(3)
        repo.prune(KeepLast(1))
        repo.gc(grace=0)
        assert repo.epochs() == [2]
        assert repo.verify().ok
        assert {info.key.split("/")[0] for info in repo.store.list()} == {"ckptstore.json", "manifests", "attempts"}
