"""A real training run with flax and optax that is killed and resumed ends bit for bit as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckptstore
from tests.adapters.programs import Life, killed_twice, live, s3_environment

pytest.importorskip("flax.linen", reason="needs flax: make test-adapters")
pytest.importorskip("optax", reason="needs optax: make test-adapters")
pytestmark = pytest.mark.usefixtures("entry_points")

PROGRAM = "train_jax.py"
STEPS, EVERY = 60, 5
ARGUMENTS = "--steps", str(STEPS), "--every", str(EVERY)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Lets all lives use what the first one has compiled: most of their time would go there."""
    folder = str(tmp_path_factory.mktemp("compiled"))
    always = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    return {"JAX_COMPILATION_CACHE_DIR": folder, **always}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, compiled: dict[str, str]) -> Life:
    """The same run without kills."""
    life = live(PROGRAM, str(tmp_path_factory.mktemp("undisturbed") / "run"), *ARGUMENTS, environment=compiled)
    assert life.code == 0
    losses = [float(line.split()[3]) for line in life.lines if line.startswith("step ")]
    assert losses[-1] < losses[0]
    return life


@pytest.mark.kill
def test_a_killed_run_ends_bit_identical(undisturbed: Life, compiled: dict[str, str], tmp_path: Path) -> None:
    """P1, P7: parameters in float32 and bfloat16, moments, step (weakly typed), PRNG key; saved in the background."""
    saves = STEPS // EVERY
    lives = killed_twice(PROGRAM, str(tmp_path / "run"), *ARGUMENTS, seed=1, saves=saves, environment=compiled)
    assert lives[-1].end == undisturbed.end


@pytest.mark.kill
def test_a_killed_run_on_s3_ends_bit_identical(s3: Any, undisturbed: Life, compiled: dict[str, str]) -> None:
    """P1, P7: the same on a real S3 server, where a kill cuts connections."""
    url = s3.url()
    saves = STEPS // EVERY
    environment = {**compiled, **s3_environment(s3)}
    lives = killed_twice(PROGRAM, url, *ARGUMENTS, seed=2, saves=saves, environment=environment)
    assert lives[-1].end == undisturbed.end
    with ckptstore.open(url, storage_options=s3.storage_options, create=False) as repository:
        assert repository.latest(deep=True).epoch == STEPS  # type: ignore[union-attr]
        assert repository.verify().ok
