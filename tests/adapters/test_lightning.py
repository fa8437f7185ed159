"""The adapter for Lightning, with real Trainers and real repositories. Killed runs: ``test_lightning_lives.py``."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ckptstore
from ckptstore import (
    AccessError,
    CorruptionError,
    EpochExistsError,
    EpochNotFoundError,
    InvalidArgumentError,
    InvalidRecordError,
    KeepBest,
    KeepLast,
    Repository,
)
from ckptstore.stores import MemoryStore

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Lightning's own
    pytest.mark.skipif(
        importlib.util.find_spec("pytorch_lightning") is None, reason="needs pytorch-lightning: make test-adapters"
    ),
]


@pytest.fixture(scope="module")
def kit() -> Any:
    """The framework, the adapter and the example, imported when the first test needs them."""
    import pytorch_lightning
    import torch

    from ckptstore.adapters import lightning
    from examples import lightning_training

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    return SimpleNamespace(pl=pytorch_lightning, torch=torch, ours=lightning, example=lightning_training)


def trainer_of(kit: Any, folder: Path, *callbacks: Any, epochs: int = 3, **options: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    options = {**quiet, "accelerator": "cpu", "default_root_dir": folder, **options}
    return kit.pl.Trainer(max_epochs=epochs, callbacks=list(callbacks), **options)


def fit(kit: Any, trainer: Any, model: Any = None, **options: Any) -> Any:
    model = kit.example.Model() if model is None else model
    trainer.fit(model, kit.example.data(0, shuffle=True), kit.example.data(1, shuffle=False), **options)
    return model


def rot(store: MemoryStore, epoch: int) -> None:
    """Flip a bit in the chunks of an epoch."""
    catalog = Repository(store)._catalog
    for info in store.list(f"attempts/{catalog.manifest(catalog.committed(epoch)[-1]).attempt}/chunks/"):
        data = bytearray(store.get(info.key))
        data[-1] ^= 1
        store.delete(info.key)
        store.put(info.key, bytes(data))


class Failing(MemoryStore):
    """A store that refuses chunks as long as it is told to."""

    broken = False

    def put(self, key: str, data: Any, *, if_absent: bool = False) -> None:
        if self.broken and "/chunks/" in key:
            raise AccessError("refused", key=key)
        super().put(key, data, if_absent=if_absent)


def test_a_run_saves_and_keeps(kit: Any, tmp_path: Path) -> None:
    """Each epoch is saved under its step with all metrics, and the repository's policy decides what stays."""
    repo = Repository(MemoryStore(), keep=KeepLast(1) | KeepBest("val_loss", 1))
    losses = {}

    class Watch(kit.pl.Callback):  # type: ignore[misc]
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            losses[trainer.global_step] = float(trainer.callback_metrics["val_loss"])

    fit(kit, trainer_of(kit, tmp_path, kit.ours.CkptStoreCheckpoint(repo), Watch(), epochs=4))
    best = min(losses, key=lambda step: (losses[step], -step))
    assert list(losses) == [6, 12, 18, 24]
    assert repo.epochs() == sorted({24, best})
    ckpt = repo.checkpoint(24)
    assert ckpt.metadata["val_loss"] == losses[24]
    assert ckpt.metadata["lightning"] == {"epoch": 3, "global_step": 24, "paths": ["epoch=3-step=24.ckpt"]}
    assert sorted(ckpt.records) == ["files", "lr_scheduler", "model", "optimizer", "trainer"]
    assert list(tmp_path.iterdir()) == [], "nothing is written beside the repository"


def test_the_dict_comes_back_exactly(kit: Any, tmp_path: Path) -> None:
    """P7: keys in order, types, tensors, callbacks, loops: what Lightning gave is what it gets."""
    repo = Repository(MemoryStore())
    io = kit.ours.CkptStoreIO(repo, background=False)
    stopping = kit.pl.callbacks.EarlyStopping("val_loss", patience=5)
    trainer = trainer_of(kit, tmp_path, kit.ours.CkptStoreCheckpoint(repo), stopping, plugins=[io], epochs=2)
    given: dict[str, Any] = {}
    save = io.save_checkpoint

    def saving(whole: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        given.update(whole)
        save(whole, path, storage_options)

    io.save_checkpoint = saving
    fit(kit, trainer)
    found = io.load_checkpoint("latest")
    assert list(found) == list(given)
    assert {"callbacks", "loops", "optimizer_states", "lr_schedulers", "hyper_parameters"} <= found.keys()
    assert type(found["state_dict"]) is OrderedDict
    assert vars(found["state_dict"]) == vars(given["state_dict"])
    leaves = kit.torch.utils._pytree.tree_flatten
    values, shape = leaves(given)
    again, same = leaves(found)
    assert str(shape) == str(same)
    assert len(values) == len(again) > 100
    for one, two in zip(values, again, strict=True):
        assert type(one) is type(two)
        assert kit.torch.equal(one, two) if isinstance(one, kit.torch.Tensor) else str(one) == str(two)


def test_what_cannot_be_stored_is_refused_when_training_starts(kit: Any, tmp_path: Path) -> None:
    """P7: code among the hyperparameters is named with its path and advice, before a step is done or a byte written."""
    repo = Repository(MemoryStore())
    steps: list[int] = []

    class Model(kit.example.Model):  # type: ignore[misc]
        def __init__(self, act: Any) -> None:
            super().__init__()
            self.save_hyperparameters()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            steps.append(batch_idx)
            return super().training_step(batch, batch_idx)

    with pytest.raises(InvalidRecordError, match=r"(?s)trainer\.hyper_parameters\.act: .*code.*save_hyperparameters"):
        fit(kit, trainer_of(kit, tmp_path, kit.ours.CkptStoreCheckpoint(repo)), Model(os.path.join))
    assert (steps, repo.epochs()) == ([], [])


def test_latest_steps_back_over_damage_and_goes_on(kit: Any, tmp_path: Path) -> None:
    """P3, P5: the newest epoch has rotted; the one before is loaded, and the steps that are done again replace it."""
    store = MemoryStore()
    fit(kit, trainer_of(kit, tmp_path, kit.ours.CkptStoreCheckpoint(Repository(store)), epochs=3))
    undisturbed = Repository(store).checkpoint(18).load("model")
    rot(store, 18)
    repo = Repository(store)
    callback = kit.ours.CkptStoreCheckpoint(repo)
    fit(kit, trainer_of(kit, tmp_path, callback, epochs=3), ckpt_path="latest")
    assert callback._io.resumed == (12, 1)
    assert repo.verify().ok
    again = repo.checkpoint(18)
    assert again.generation == 2
    model = again.load("model")
    assert all(kit.torch.equal(model[name], undisturbed[name]) for name in undisturbed)


def test_steps_of_another_run_are_not_overwritten(kit: Any, tmp_path: Path) -> None:
    """P5: a run that starts anew in a repository with epochs of its numbers is told so; ``replace`` allows it."""
    repo = Repository(MemoryStore())
    fit(kit, trainer_of(kit, tmp_path, kit.ours.CkptStoreCheckpoint(repo), epochs=1))
    with pytest.raises(EpochExistsError):
        fit(kit, trainer_of(kit, tmp_path, kit.ours.CkptStoreCheckpoint(repo), epochs=1))
    assert repo.checkpoint(6).generation == 1
    fit(kit, trainer_of(kit, tmp_path, kit.ours.CkptStoreCheckpoint(repo, replace=True), epochs=1))
    assert repo.checkpoint(6).generation == 2


def test_lightnings_own_callback_on_a_repository(kit: Any, tmp_path: Path) -> None:
    """``ModelCheckpoint(save_top_k, save_last)`` works through the plugin: its removals, its names, its best."""
    store = MemoryStore()
    repo = Repository(store)
    io = kit.ours.CkptStoreIO(repo)
    durable: list[tuple[str, list[int]]] = []
    remove = io.remove_checkpoint

    def removing(path: Any) -> None:
        remove(path)
        durable.append((str(path), repo.epochs()))

    io.remove_checkpoint = removing
    callback = kit.pl.callbacks.ModelCheckpoint(
        tmp_path / "checkpoints", monitor="val_loss", save_top_k=2, save_last=True
    )
    trainer = trainer_of(kit, tmp_path, callback, plugins=[io], epochs=6)
    model = fit(kit, trainer)
    names = {name for epoch in repo.epochs() for name in repo.checkpoint(epoch).metadata["lightning"]["paths"]}
    assert {*callback.best_k_models, callback.last_model_path} <= names
    steps = {int(path.rpartition("step=")[2].removesuffix(".ckpt")) for path in callback.best_k_models}
    assert repo.epochs() == sorted(steps | {36})
    assert durable, "Lightning has removed some"
    scores = {epoch: repo.checkpoint(epoch).metadata["val_loss"] for epoch in steps}
    assert scores == {
        int(path.rpartition("step=")[2].removesuffix(".ckpt")): float(score)
        for path, score in callback.best_k_models.items()
    }
    [result] = trainer.test(_tested(kit)(), kit.example.data(1, shuffle=False), ckpt_path="best", verbose=False)
    assert result["test_loss"] == pytest.approx(min(scores.values()))
    trainer.fit_loop.max_epochs = 7
    trainer.fit(model, kit.example.data(0, True), kit.example.data(1, False), ckpt_path=callback.last_model_path)
    assert repo.epochs()[-1] == 42
    assert not list(tmp_path.rglob("*.ckpt")), "no file of Lightning's"


def _tested(kit: Any) -> Any:
    class Tested(kit.example.Model):  # type: ignore[misc]
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", kit.torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    return Tested


def test_removed_only_when_the_newer_is_durable(kit: Any) -> None:
    """P5: Lightning removes an old checkpoint as soon as it has asked for the new one. It goes when that is committed,
    and never when that failed."""
    store = Failing()
    repo = Repository(store)
    io = kit.ours.CkptStoreIO(repo)
    whole = {"global_step": 1, "pytorch-lightning_version": "2", "state_dict": {"w": kit.torch.ones(5)}}
    io.save_checkpoint(whole, "a.ckpt")
    io.settle()
    store.broken = True
    io.save_checkpoint({**whole, "global_step": 2, "state_dict": {"w": kit.torch.zeros(5)}}, "b.ckpt")
    io.remove_checkpoint("a.ckpt")
    with pytest.raises(AccessError):
        io.settle()
    assert repo.epochs() == [1]
    store.broken = False
    io.save_checkpoint({**whole, "global_step": 2}, "b.ckpt")
    io.settle()
    assert repo.epochs() == [2]
    repo.pin(2, "a release")
    io.save_checkpoint({**whole, "global_step": 3}, "c.ckpt")
    io.remove_checkpoint("b.ckpt")
    io.settle()
    assert repo.epochs() == [2, 3], "a pin outlives Lightning's wish"


def test_with_a_policy_lightning_removes_nothing(kit: Any) -> None:
    """Retention is the repository's where it has a policy."""
    repo = Repository(MemoryStore(), keep=KeepLast(3))
    io = kit.ours.CkptStoreIO(repo, background=False)
    whole = {"pytorch-lightning_version": "2", "state_dict": {}}
    for step in (1, 2):
        io.save_checkpoint({**whole, "global_step": step}, f"{step}.ckpt")
    io.remove_checkpoint("1.ckpt")
    io.teardown()
    assert repo.epochs() == [1, 2]


def test_names_numbers_and_files(kit: Any, tmp_path: Path) -> None:
    """A path is a number, a name with or without its folder, or a file of torch's that Lightning reads itself."""
    repo = Repository(MemoryStore())
    io = kit.ours.CkptStoreIO(repo, background=False)
    for step in (10, 20):
        whole = {"global_step": step, "pytorch-lightning_version": "2", "state_dict": {"w": kit.torch.ones(3) * step}}
        io.save_checkpoint(whole, f"/runs/a/epoch=0-step={step}.ckpt")
    for path, step in (("10", 10), ("/runs/a/epoch=0-step=20.ckpt", 20), ("epoch=0-step=10.ckpt", 10), ("latest", 20)):
        assert io.load_checkpoint(path)["global_step"] == step
    moved = io.load_checkpoint("10", map_location="meta")
    assert moved["state_dict"]["w"].is_meta
    kit.torch.save({"global_step": 5}, tmp_path / "old.ckpt")
    assert io.load_checkpoint(tmp_path / "old.ckpt") == {"global_step": 5}
    for path in ("30", "nothing.ckpt"):
        with pytest.raises(EpochNotFoundError):
            io.load_checkpoint(path)
    with pytest.raises(InvalidRecordError, match="global_step"):
        io.save_checkpoint({"state_dict": {}}, "fabric.ckpt")
    with pytest.raises(InvalidArgumentError, match="storage_options"):
        io.save_checkpoint({"global_step": 1}, "x.ckpt", {"key": "secret"})


def test_a_failed_background_save_ends_the_run(kit: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """P4: an error of the last save is raised by ``fit``; beside another error it is logged and does not hide that."""
    store = Failing()
    store.broken = True
    with pytest.raises(AccessError):
        fit(kit, trainer_of(kit, tmp_path, kit.ours.CkptStoreCheckpoint(Repository(store)), epochs=1))

    class Stops(kit.pl.Callback):  # type: ignore[misc]
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(kit, trainer_of(kit, tmp_path, kit.ours.CkptStoreCheckpoint(Repository(store)), Stops(), epochs=2))
    assert "was not saved" in caplog.text


def test_when_it_saves(kit: Any, tmp_path: Path) -> None:
    """By steps, by time, when an exception ends it; and a step that was saved is replaced when its epoch is over."""
    steps = Repository(MemoryStore())
    callback = kit.ours.CkptStoreCheckpoint(steps, every_n_train_steps=4, every_n_epochs=2)
    fit(kit, trainer_of(kit, tmp_path, callback, epochs=2))
    assert steps.epochs() == [4, 8, 12]
    assert steps.checkpoint(12).generation == 2
    timed = Repository(MemoryStore())
    always = kit.ours.CkptStoreCheckpoint(timed, train_time_interval=timedelta(0))
    fit(kit, trainer_of(kit, tmp_path, always, epochs=1))
    assert timed.epochs() == [1, 2, 3, 4, 5, 6]

    class Stops(kit.pl.Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                raise KeyboardInterrupt

    at_need = Repository(MemoryStore())
    callback = kit.ours.CkptStoreCheckpoint(at_need, every_n_epochs=1, save_on_exception=True)
    with pytest.raises(SystemExit):
        fit(kit, trainer_of(kit, tmp_path, callback, Stops(), epochs=1))
    assert at_need.epochs() == [3]
    trial = Repository(MemoryStore())
    fit(kit, trainer_of(kit, tmp_path, kit.ours.CkptStoreCheckpoint(trial), fast_dev_run=True))
    assert trial.epochs() == []


class Breaks:
    """Ends a run after a step, before it is saved."""

    def __new__(cls, kit: Any, at: int) -> Any:
        class Callback(kit.pl.Callback):  # type: ignore[misc]
            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                if trainer.global_step == at:
                    raise RuntimeError("broken off")

        return Callback()


@pytest.mark.parametrize("accumulated", [1, 2])
def test_broken_off_at_any_step_with_a_loader_that_goes_on(kit: Any, tmp_path: Path, accumulated: int) -> None:
    """Saved at each step, also where gradients are summed over batches, and broken off amid epochs."""
    from ckptstore.adapters.torch import ResumableLoader

    def run(repo: Repository, *callbacks: Any) -> Any:
        kit.pl.seed_everything(1, verbose=False)
        model = kit.example.Model()
        loader = ResumableLoader(kit.example.data(0, shuffle=True).dataset, 16, seed=3)
        ours = kit.ours.CkptStoreCheckpoint(repo, every_n_train_steps=1)
        trainer = trainer_of(kit, tmp_path, ours, *callbacks, epochs=3, accumulate_grad_batches=accumulated)
        trainer.fit(model, loader, ckpt_path="latest")
        return model.state_dict(), trainer.global_step

    undisturbed, steps = run(Repository(MemoryStore()))
    assert steps == 18 // accumulated  # no epoch is empty, or cut short
    repo, each = Repository(MemoryStore()), 6 // accumulated
    for at in (2, each + 2, 2 * each + 2):
        with pytest.raises(RuntimeError, match="broken off"):
            run(repo, Breaks(kit, at))
    ended, steps = run(repo)
    assert steps == 18 // accumulated
    assert repo.epochs() == list(range(1, steps + 1))  # never amid an accumulation
    assert all(kit.torch.equal(ended[name], undisturbed[name]) for name in undisturbed)


def test_saved_behind_the_last_batch_of_an_epoch(kit: Any, tmp_path: Path) -> None:
    """Lightning begins an epoch when it goes on: it gets all batches of it."""
    from ckptstore.adapters.torch import ResumableLoader

    repo = Repository(MemoryStore())
    for epochs in (1, 2):
        loader = ResumableLoader(kit.example.data(0, shuffle=True).dataset, 16)
        trainer = trainer_of(kit, tmp_path, kit.ours.CkptStoreCheckpoint(repo), epochs=epochs)
        trainer.fit(kit.example.Model(), loader, ckpt_path="latest")
        assert trainer.global_step == 6 * epochs


def test_a_second_run_of_one_process_is_another_run(kit: Any, tmp_path: Path) -> None:
    """P5: a callback that serves two Trainers: the steps of the first are not replaced by those of the second."""
    repo = Repository(MemoryStore())
    callback = kit.ours.CkptStoreCheckpoint(repo)
    fit(kit, trainer_of(kit, tmp_path, callback, epochs=2))
    with pytest.raises(EpochExistsError):
        fit(kit, trainer_of(kit, tmp_path, callback, epochs=2))
    assert [repo.checkpoint(epoch).generation for epoch in repo.epochs()] == [1, 1]
    trainer = trainer_of(kit, tmp_path, callback, epochs=2)
    model = fit(kit, trainer, ckpt_path="latest")
    trainer.fit_loop.max_epochs = 3  # the same run goes on
    fit(kit, trainer, model)
    trainer.save_checkpoint("final.ckpt")
    callback._io.settle()
    assert repo.epochs() == [6, 12, 18]


def test_nothing_cannot_be_tested(kit: Any, tmp_path: Path) -> None:
    """P4: "latest" of an empty repository begins a training, and is no model for a test."""
    trainer = trainer_of(kit, tmp_path, kit.ours.CkptStoreCheckpoint(Repository(MemoryStore())))
    model, loader = _tested(kit)(), kit.example.data(1, shuffle=False)
    for verb in (trainer.test, trainer.validate):
        with pytest.raises(EpochNotFoundError):
            verb(model, loader, ckpt_path="latest", verbose=False)


def test_weights_alone_are_for_tests(kit: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Training goes on after the newest epoch that it can go on from; a test takes the newest."""
    repo = Repository(MemoryStore())
    fit(kit, trainer_of(kit, tmp_path, kit.ours.CkptStoreCheckpoint(repo), epochs=1))
    light = kit.ours.CkptStoreCheckpoint(repo, save_weights_only=True)
    fit(kit, trainer_of(kit, tmp_path, light, epochs=2), ckpt_path="latest")
    callback = kit.ours.CkptStoreCheckpoint(repo)
    trainer = trainer_of(kit, tmp_path, callback, epochs=2)
    trainer.test(_tested(kit)(), kit.example.data(1, shuffle=False), ckpt_path="latest", verbose=False)
    assert callback._io.resumed == (12, 1)
    fit(kit, trainer, ckpt_path="latest")
    assert callback._io.resumed == (6, 1)
    assert "epoch 12 holds weights alone" in caplog.text
    assert "optimizer" in repo.checkpoint(12).records


def test_a_name_whose_epoch_is_damaged(kit: Any, caplog: pytest.LogCaptureFixture) -> None:
    """P4: what cannot be read is not missing; an older epoch of that name is taken, and it is said."""
    store = MemoryStore()
    for step, name in ((1, "last.ckpt"), (2, "last.ckpt"), (3, "three.ckpt")):
        io = kit.ours.CkptStoreIO(Repository(store), background=False)  # of another life each
        io.save_checkpoint({"global_step": step, "state_dict": {}, "pytorch-lightning_version": "2"}, name)
    for step in (2, 3):
        [info] = store.list(f"manifests/{step:012d}")
        store.delete(info.key)
        store.put(info.key, b"damaged")
    again = kit.ours.CkptStoreIO(Repository(store))
    with pytest.raises(CorruptionError):
        again.load_checkpoint("three.ckpt")
    assert again.load_checkpoint("last.ckpt")["global_step"] == 1
    assert caplog.text.count("may be a newer epoch than 1") == 2


def test_the_best_of_nan(kit: Any, tmp_path: Path) -> None:
    """A score that is no number is never the best; where there is no other, there is none."""
    repo = Repository(MemoryStore())
    callback = kit.ours.CkptStoreCheckpoint(repo, monitor="score")
    repo.save(1, {"model": [1]}, {"score": float("nan")})
    repo.save(2, {"model": [1]}, {"score": "good"})
    assert callback.best_model_path == ""
    repo.save(3, {"model": [1]}, {"score": 2.0})
    assert callback.best_model_path == "3"


def test_best_in_another_process(kit: Any, tmp_path: Path) -> None:
    """``ckpt_path="best"`` asks the repository, also in a Trainer that has trained nothing."""
    store = MemoryStore()
    fit(kit, trainer_of(kit, tmp_path, kit.ours.CkptStoreCheckpoint(Repository(store)), epochs=3))
    repo = Repository(store)
    scores = {epoch: repo.checkpoint(epoch).metadata["val_loss"] for epoch in repo.epochs()}
    callback = kit.ours.CkptStoreCheckpoint(repo, monitor="val_loss")
    assert callback.best_model_path == str(min(scores, key=lambda epoch: scores[epoch]))
    trainer = trainer_of(kit, tmp_path, callback)
    [result] = trainer.test(_tested(kit)(), kit.example.data(1, shuffle=False), ckpt_path="best", verbose=False)
    assert result["test_loss"] == pytest.approx(min(scores.values()))
    assert kit.ours.CkptStoreCheckpoint(repo).best_model_path == ""
    assert kit.ours.CkptStoreCheckpoint(Repository(MemoryStore()), monitor="x").best_model_path == ""


def test_export_gives_lightning_its_file(kit: Any, tmp_path: Path) -> None:
    """``export`` writes the .ckpt that ``load_from_checkpoint`` reads: weights and hyperparameters."""
    repo = Repository(MemoryStore())
    narrow = kit.example.Model(width=16)
    model = fit(kit, trainer_of(kit, tmp_path, kit.ours.CkptStoreCheckpoint(repo), epochs=1), narrow)
    repo.export(6, tmp_path / "out", format="files")
    again = kit.example.Model.load_from_checkpoint(tmp_path / "out" / "step=6.ckpt", weights_only=True)
    assert again.hparams == {"width": 16, "lr": 0.01}
    assert all(kit.torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


def test_plugins_that_save_elsewhere_are_refused(kit: Any, tmp_path: Path) -> None:
    """Two places for one run would be a mistake."""
    io = kit.ours.CkptStoreIO(Repository(MemoryStore()))
    callback = kit.ours.CkptStoreCheckpoint(Repository(MemoryStore()))
    with pytest.raises(InvalidArgumentError, match="the callback to"):
        fit(kit, trainer_of(kit, tmp_path, callback, plugins=[io]))
    other = kit.pl.plugins.io.XLACheckpointIO.__new__(kit.pl.plugins.io.XLACheckpointIO)
    with pytest.raises(InvalidArgumentError, match="saves elsewhere"):
        fit(kit, trainer_of(kit, tmp_path, callback, plugins=[other]))


def test_every_scheduler_can_be_stored(kit: Any) -> None:
    """P7: no scheduler of torch keeps code in its state."""
    torch = kit.torch
    module = torch.optim.lr_scheduler
    arguments: dict[str, Any] = {
        "LambdaLR": {"lr_lambda": lambda step: 0.5}, "MultiplicativeLR": {"lr_lambda": lambda step: 0.5},
        "StepLR": {"step_size": 2}, "MultiStepLR": {"milestones": [1, 2]}, "ConstantLR": {}, "LinearLR": {},
        "ExponentialLR": {"gamma": 0.5}, "PolynomialLR": {}, "CosineAnnealingLR": {"T_max": 5},
        "ReduceLROnPlateau": {}, "CyclicLR": {"base_lr": 0.1, "max_lr": 0.2, "cycle_momentum": False},
        "CosineAnnealingWarmRestarts": {"T_0": 2}, "OneCycleLR": {"max_lr": 0.1, "total_steps": 9},
    }  # fmt: skip
    repo = Repository(MemoryStore())

    def optimizer() -> Any:
        return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)

    states = {name: getattr(module, name)(optimizer(), **given).state_dict() for name, given in arguments.items()}
    shared = optimizer()
    parts = [module.ConstantLR(shared), module.ExponentialLR(shared, 0.5)]
    states["SequentialLR"] = module.SequentialLR(shared, parts, [2]).state_dict()
    states["ChainedScheduler"] = module.ChainedScheduler([module.ConstantLR(shared)]).state_dict()
    repo.save(1, {"lr_scheduler": states})
    assert str(repo.checkpoint(1).load("lr_scheduler")) == str(states)


def test_it_is_opened_by_url(kit: Any, tmp_path: Path) -> None:
    """From a path to a resumed run, as docs/lightning.md shows it."""
    for epochs in (1, 2):
        with ckptstore.open(tmp_path / "repository") as repo:
            kit.example.train(repo, epochs, default_root_dir=tmp_path)
            assert repo.epochs()[-1] == 6 * epochs


def test_a_url_will_do(kit: Any, tmp_path: Path) -> None:
    """Callback and plugin take a URL in the place of a repository, as the adapters of other frameworks do."""
    url = str(tmp_path / "repository")
    fit(kit, trainer_of(kit, tmp_path, kit.ours.CkptStoreCheckpoint(url)))
    with ckptstore.open(url, create=False) as repo:
        assert kit.ours.CkptStoreIO(url).repo.epochs() == repo.epochs() != []
