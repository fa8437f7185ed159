"""The callback for Keras: a run that is killed and resumed ends bit for bit as if nothing had happened."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptstore
from ckptstore import InvalidArgumentError, InvalidRecordError, KeepLast
from tests.adapters.programs import killed_twice, live, s3_environment

os.environ.setdefault("KERAS_BACKEND", "jax")
pytest.importorskip("jax.numpy", reason="needs jax: make test-adapters")
pytest.importorskip("keras.layers", reason="needs keras: make test-adapters")

jax: Any = importlib.import_module("jax")
keras: Any = importlib.import_module("keras")
adapter: Any = importlib.import_module("ckptstore.adapters.keras")
SaveAndResume = adapter.SaveAndResume

jax.config.update("jax_num_cpu_devices", 8)  # as the tests for JAX, which share the process

PROGRAM = "train_keras.py"
EPOCHS = 10


def environment_of(backend: str, folder: Path) -> dict[str, str]:
    """Lets all lives use what the first one has compiled."""
    always = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    return {"KERAS_BACKEND": backend, "OMP_NUM_THREADS": "1", "JAX_COMPILATION_CACHE_DIR": str(folder), **always}


@pytest.mark.kill
@pytest.mark.parametrize(("backend", "place"), [("jax", "folder"), ("torch", "s3")])
def test_a_killed_run_ends_bit_identical(
    backend: str, place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """P1, P7: variables of model and optimizer, seeds of dropout, order of shuffled data; killed twice in its saves."""
    if backend == "torch":
        pytest.importorskip("torch.nn", reason="needs torch: make test-adapters")
    environment = environment_of(backend, tmp_path / "compiled")
    epochs = "--epochs", str(EPOCHS)
    undisturbed = live(PROGRAM, str(tmp_path / "undisturbed"), *epochs, environment=environment)
    assert undisturbed.code == 0
    url, options = str(tmp_path / "run"), None
    if place == "s3":
        bucket = request.getfixturevalue("s3")
        url, options = bucket.url(), bucket.storage_options
        environment |= s3_environment(bucket)
    lives = killed_twice(PROGRAM, url, *epochs, seed=3, saves=EPOCHS, environment=environment)
    assert lives[-1].end == undisturbed.end
    with ckptstore.open(url, storage_options=options, create=False) as repository:
        newest = repository.latest(deep=True)
        assert newest is not None
        assert newest.epoch == EPOCHS - 1
        assert newest.metadata["loss"] > 0
        assert repository.verify().ok


def data() -> dict[str, Any]:
    """What all runs here are trained on."""
    inputs = np.random.default_rng(1).normal(size=(32, 8)).astype("float32")
    return {"x": inputs, "y": inputs[:, :4].argmax(1), "batch_size": 8, "verbose": 0}


def make_model(width: int = 8) -> Any:
    """Float32 variables, computations in bfloat16, and loss scaling."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(width), keras.layers.Dropout(0.2), keras.layers.Dense(4, dtype="bfloat16")]
    model = keras.Sequential([keras.Input((8,)), *layers])
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-2))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def bits(model: Any) -> list[tuple[str, str, bytes]]:
    """All variables."""
    variables = [*model.variables, *model.optimizer.variables]
    return [(str(v.path), str(v.dtype), keras.ops.convert_to_numpy(v.value).tobytes()) for v in variables]


def values(model: Any) -> list[bytes]:
    """All variables without their names: those of a second model in the same process differ."""
    return [value for _, _, value in bits(model)]


def fresh() -> Any:
    """A model with the names that the first one of a process has."""
    keras.backend.clear_session()
    return make_model()


@pytest.fixture(autouse=True, scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Models here are the same again and again: they need not be compiled again and again."""
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    yield
    jax.config.update("jax_compilation_cache_dir", before[0])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])


@pytest.fixture(scope="module")
def whole(compiled: None) -> Any:
    """What four epochs that nobody interrupts lead to."""
    model = fresh()
    model.fit(**data(), epochs=4)
    return bits(model)


def test_parts_are_one_run(whole: Any, tmp_path: Path) -> None:
    """A fit that is resumed equals one that was not interrupted: also with loss scaling and bfloat16 variables."""
    model: Any = None
    for epochs, background in ((1, True), (3, False), (4, True)):
        model = fresh()
        history = model.fit(**data(), epochs=epochs, callbacks=[SaveAndResume(tmp_path / "run", background=background)])
        assert history.epoch == {1: [0], 3: [1, 2], 4: [3]}[epochs]
    assert bits(model) == whole
    with ckptstore.open(tmp_path / "run") as repository:
        assert repository.epochs() == [0, 1, 2, 3]
        found = repository.latest().load()  # type: ignore[union-attr]
    assert sorted(found) == ["model", "optimizer", "random"]
    assert np.array_equal(found["model"]["sequential/dense/kernel"], model.layers[0].kernel.value)
    assert sorted(map(str, {a.dtype for a in found["model"].values()})) == ["bfloat16", "float32", "uint32"]


def test_saves_as_often_as_it_is_told(tmp_path: Path) -> None:
    """Every second epoch and the last one; logs are the metadata; `keep` and a repository of one's own do as ever."""
    with ckptstore.open(tmp_path / "run", keep=KeepLast(2)) as repository:
        fresh().fit(**data(), epochs=5, validation_split=0.25, callbacks=[SaveAndResume(repository, every=2)])
        assert repository.epochs() == [3, 4]
        latest = repository.latest()
        assert latest is not None
        assert set(latest.metadata) == {"loss", "val_loss"}
        again = fresh()
        assert again.fit(**data(), epochs=5, callbacks=[SaveAndResume(repository)]).epoch == []  # nothing left to do
        assert again.fit(**data(), epochs=6, callbacks=[SaveAndResume(repository)]).epoch == [5]
        with pytest.raises(ckptstore.EpochExistsError):
            again.fit(**data(), epochs=6, initial_epoch=5, callbacks=[SaveAndResume(repository, resume=False)])


def test_the_last_epoch_of_a_fit_that_another_callback_ends(tmp_path: Path) -> None:
    """It ends after ours was called, and the last epoch is saved all the same."""
    ends = keras.callbacks.EarlyStopping("loss", mode="max", patience=0)  # after two epochs: the loss falls
    with ckptstore.open(tmp_path / "run") as repository:
        model = fresh()
        model.fit(**data(), epochs=9, callbacks=[SaveAndResume(repository, every=5), ends])
        assert repository.epochs() == [1]
        latest = repository.latest()
        assert latest is not None
        assert set(latest.metadata) == {"loss"}
        again = fresh()
        adapter.restore(latest, again)
        assert bits(again) == bits(model)


def test_epochs_without_the_optimizer_are_done_again(tmp_path: Path) -> None:
    """Where ``every`` leaves it out of the newest epochs, the run goes on before them, and replaces them."""
    with ckptstore.open(tmp_path / "run", every={"optimizer": 3}) as repository:
        fresh().fit(**data(), epochs=3, callbacks=[SaveAndResume(repository)])
        assert "optimizer" not in repository.checkpoint(2).records
        assert fresh().fit(**data(), epochs=4, callbacks=[SaveAndResume(repository)]).epoch == [1, 2, 3]
        assert repository.epochs() == [0, 1, 2, 3]


def test_data_that_torch_shuffles(tmp_path: Path) -> None:
    """The random state of torch is kept whatever the backend is."""
    torch = pytest.importorskip("torch")
    arrays = [torch.tensor(np.asarray(array)) for array in data().values() if isinstance(array, np.ndarray)]
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*arrays), batch_size=16, shuffle=True)
    torch.manual_seed(5)
    undisturbed = fresh()
    undisturbed.fit(loader, epochs=3, shuffle=False, verbose=0)
    torch.manual_seed(5)
    fresh().fit(loader, epochs=1, shuffle=False, verbose=0, callbacks=[SaveAndResume(tmp_path / "run")])
    torch.manual_seed(99)
    model = fresh()
    model.fit(loader, epochs=3, shuffle=False, verbose=0, callbacks=[SaveAndResume(tmp_path / "run")])
    assert bits(model) == bits(undisturbed)


def test_steps_back_over_a_damaged_epoch(whole: Any, tmp_path: Path) -> None:
    """P3: a damaged newest epoch is trained and saved again."""
    fresh().fit(**data(), epochs=4, callbacks=[SaveAndResume(tmp_path / "run")])
    with ckptstore.open(tmp_path / "run") as repository:
        before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("chunks/*")}
        newest = max(before, key=lambda path: before[path])
        newest.write_bytes(newest.read_bytes()[:-1])
        damaged = [one.epoch for one in repository.latest(deep=True).skipped]  # type: ignore[union-attr]
        assert damaged == [3]
    model = fresh()
    assert model.fit(**data(), epochs=4, callbacks=[SaveAndResume(tmp_path / "run")]).epoch == [3]
    assert bits(model) == whole
    with ckptstore.open(tmp_path / "run") as repository:
        latest = repository.latest(deep=True)
        assert latest is not None
        assert (latest.epoch, latest.generation, latest.skipped) == (3, 2, ())


def test_another_model_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    """What does not fit is named with its path, of model and optimizer; nothing is changed."""
    with ckptstore.open(tmp_path / "run") as repository:
        checkpoint = repository.save(1, adapter.to_state(fresh()))
    keras.backend.clear_session()
    other = make_model(16)
    other.optimizer.build(other.trainable_variables)
    before = values(other)
    with pytest.raises(InvalidRecordError) as caught:
        adapter.restore(checkpoint, other)
    assert "model.sequential/dense/kernel: float32 [8, 8] in the checkpoint, float32 [8, 16] here" in str(caught.value)
    assert "optimizer." in str(caught.value)
    assert values(other) == before
    other = fresh()
    adapter.restore(checkpoint, other)
    assert values(other) != before


def test_variables_of_the_same_path_are_told_apart(tmp_path: Path) -> None:
    """Layers of the same name: both are saved, and come back to where they were."""
    model = keras.Sequential([keras.Input((4,))])
    inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, name="same")], name="same")
    model.add(inner)
    variable = keras.Variable(np.ones(3), name="same")
    assert adapter._values([variable, variable]).keys() == {"same", "same#2"}
    model.compile("sgd", "mse")
    with ckptstore.open(tmp_path / "run") as repository:
        checkpoint = repository.save(1, adapter.to_state(model))
    wanted = values(model)
    for each in model.variables:
        each.assign(each.value + 1)
    adapter.restore(checkpoint, model)
    assert values(model) == wanted


def test_arguments_that_make_no_sense(tmp_path: Path) -> None:
    """Refused when the callback is made, or when there is nothing to be saved."""
    with pytest.raises(InvalidArgumentError, match="every must be"):
        SaveAndResume(tmp_path / "run", every=0)
    with ckptstore.open(tmp_path / "run") as repository, pytest.raises(InvalidArgumentError, match="options of a URL"):
        SaveAndResume(repository, keep=KeepLast(2))
    with pytest.raises(InvalidArgumentError, match="no variables yet"):
        adapter.to_state(keras.Sequential([keras.layers.Dense(4)]))
