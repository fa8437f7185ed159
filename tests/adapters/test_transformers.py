"""The adapter for the Hugging Face Trainer, with real Trainers. Killed runs: ``test_transformers_lives.py``."""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptstore import AccessError, CorruptionError, KeepLast, Repository
from ckptstore.stores import MemoryStore

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of the frameworks
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="needs transformers: make test-adapters"
    ),
]


@pytest.fixture(scope="module")
def kit() -> Any:
    """The framework, the adapter and the example, imported when the first test needs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        import torch
        import transformers

        from ckptstore.adapters import transformers as ours
        from examples import transformers_training

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(1)
        yield SimpleNamespace(hf=transformers, torch=torch, ours=ours, example=transformers_training)


def trainer_of(kit: Any, callback: Any, output: Path, **options: Any) -> Any:
    facts = {"max_steps": 8, "save_steps": 2, "logging_steps": 2, "per_device_train_batch_size": 4, **options}
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "learning_rate": 0.01}
    args = kit.hf.TrainingArguments(str(output), **quiet, **facts)
    data = {"train_dataset": kit.example.Sentences(0, 40), "eval_dataset": kit.example.Sentences(1, 8)}
    return kit.hf.Trainer(kit.example.make_model(), args, callbacks=[callback], **data)


def folders(output: Path) -> list[int]:
    return sorted(int(place.name.removeprefix("checkpoint-")) for place in output.glob("checkpoint-*"))


class Scored:
    """Makes the model of one step the best, whatever it has learnt."""

    def __init__(self, kit: Any, best: int) -> None:
        outer = self
        self.best = best

        class Callback(kit.hf.TrainerCallback):  # type: ignore[misc]
            def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
                metrics["eval_score"] = 1.0 if state.global_step == outer.best else 1.0 / (2 + state.global_step)
                state.log_history[-1]["eval_score"] = metrics["eval_score"]

        self.callback = Callback()


SCORED = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_score",
    "greater_is_better": True,
}


class Failing(MemoryStore):
    """A store that refuses chunks as long as it is told to."""

    broken = False

    def put(self, key: str, data: Any, *, if_absent: bool = False) -> None:
        if self.broken and "/chunks/" in key:
            raise AccessError("refused", key=key)
        super().put(key, data, if_absent=if_absent)


def test_the_folder_is_the_epoch(kit: Any, tmp_path: Path) -> None:
    """P7: every file of each folder, bit for bit; the numbers of its step are metadata, by which policies choose."""
    repo = Repository(MemoryStore())
    callback = kit.ours.CkptStoreCallback(repo)
    trainer_of(kit, callback, tmp_path / "out", max_steps=4, eval_strategy="steps", eval_steps=4).train()
    assert repo.epochs() == folders(tmp_path / "out") == [2, 4]
    place, ckpt = tmp_path, repo.checkpoint(2)
    place, ckpt = tmp_path / "out" / "checkpoint-4", repo.checkpoint(4)
    for step in (2, 4):
        place, ckpt = tmp_path / "out" / f"checkpoint-{step}", repo.checkpoint(step)
        assert sorted(ckpt.records) == sorted(path.name for path in place.iterdir())
        assert all(ckpt.load(name) == (place / name).read_bytes() for name in ckpt.records)
    history = {entry["step"]: entry for entry in json.loads((place / "trainer_state.json").read_text())["log_history"]}
    assert ckpt.metadata["eval_loss"] == history[4]["eval_loss"]
    assert ckpt.metadata["loss"] > 0
    assert "eval_loss" not in repo.checkpoint(2).metadata
    assert ckpt.metadata["transformers"] == {"epoch": 0.4, "global_step": 4, "best_global_step": None}


def test_restore(kit: Any, tmp_path: Path) -> None:
    """None for nothing; the newest, or a step; by a folder or the TrainingArguments. Damage is stepped over."""
    store = MemoryStore()
    callback = kit.ours.CkptStoreCallback(Repository(store))
    assert callback.restore(tmp_path / "none") is None
    trainer = trainer_of(kit, callback, tmp_path / "out", max_steps=4)
    assert callback.restore(trainer.args) is None
    trainer.train()
    again = kit.ours.CkptStoreCallback(Repository(store))
    assert again.restore(tmp_path / "new") == str(tmp_path / "new" / "checkpoint-4")
    assert again.restore(str(tmp_path / "new"), 2) == str(tmp_path / "new" / "checkpoint-2")
    moved = trainer_of(kit, again, tmp_path / "moved")
    assert again.restore(moved.args) == str(tmp_path / "moved" / "checkpoint-4")
    assert kit.hf.trainer_utils.get_last_checkpoint(tmp_path / "moved") == str(tmp_path / "moved" / "checkpoint-4")
    catalog = Repository(store)._catalog
    for info in list(store.list(f"attempts/{catalog.manifest(catalog.committed(4)[-1]).attempt}/chunks/")):
        data = store.get(info.key)
        store.delete(info.key)
        store.put(info.key, data[:-1] + bytes([data[-1] ^ 1]))
    repo = Repository(store)
    mending = kit.ours.CkptStoreCallback(repo)
    trainer = trainer_of(kit, mending, tmp_path / "mended", max_steps=4)
    trainer.train(resume_from_checkpoint=mending.restore(trainer.args))
    assert repo.verify().ok
    assert repo.checkpoint(4).generation == 2
    with pytest.raises(CorruptionError):
        kit.ours.CkptStoreCallback(Repository(_rotten(store))).restore(tmp_path / "rotten")


def _rotten(store: MemoryStore) -> MemoryStore:
    copy = MemoryStore()
    for info in store.list():
        data = store.get(info.key)
        copy.put(info.key, data[:-1] + bytes([data[-1] ^ 1]) if "/chunks/" in info.key else data)
    return copy


def test_save_total_limit(kit: Any, tmp_path: Path) -> None:
    """P5: the Trainer's own limit counts in a repository without a policy: the newest and the best stay."""
    repo = Repository(MemoryStore())
    scored = Scored(kit, best=2)
    callback = kit.ours.CkptStoreCallback(repo)
    trainer = trainer_of(kit, callback, tmp_path / "out", save_total_limit=2, **SCORED)
    trainer.callback_handler.callbacks.insert(0, scored.callback)
    trainer.train()
    assert trainer.state.best_global_step == 2
    assert repo.epochs() == folders(tmp_path / "out") == [2, 8]
    kept = Repository(MemoryStore(), keep=KeepLast(3))
    trainer_of(kit, kit.ours.CkptStoreCallback(kept), tmp_path / "other", save_total_limit=1).train()
    assert kept.epochs() == [4, 6, 8], "the repository's own policy goes first"


def test_an_old_step_goes_when_the_new_one_is_durable(kit: Any, tmp_path: Path) -> None:
    """P5: the Trainer deletes its old folder before ours is sent. In the repository the old step stays until it is."""
    store = Failing()
    repo = Repository(store)
    callback = kit.ours.CkptStoreCallback(repo)

    class Breaks(kit.hf.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                callback._folders.settle()
                store.broken = True

    trainer = trainer_of(kit, callback, tmp_path / "out", save_total_limit=1)
    trainer.add_callback(Breaks())
    with pytest.raises(AccessError):
        trainer.train()
    assert repo.epochs() == [2]
    assert repo.verify().ok
    assert 2 not in folders(tmp_path / "out")


def test_local_folders_can_go(kit: Any, tmp_path: Path) -> None:
    """``remove_local``: what is durable is removed from this disk, but for the best model, which the Trainer loads."""
    repo = Repository(MemoryStore())
    scored = Scored(kit, best=4)
    callback = kit.ours.CkptStoreCallback(repo, remove_local=True)
    trainer = trainer_of(kit, callback, tmp_path / "out", **SCORED)
    trainer.callback_handler.callbacks.insert(0, scored.callback)
    trainer.train()
    assert folders(tmp_path / "out") == [4]
    assert repo.epochs() == [2, 4, 6, 8]
    warn = Failing()
    warn.broken = True
    callback = kit.ours.CkptStoreCallback(Repository(warn, on_error="warn"), remove_local=True)
    trainer_of(kit, callback, tmp_path / "kept", max_steps=4).train()
    assert folders(tmp_path / "kept") == [2, 4], "what was not saved stays"


def test_the_best_model_on_another_machine(kit: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The best model lies in a folder of the machine before: it is restored too, and loaded at the end."""
    store = MemoryStore()
    scored = Scored(kit, best=2)
    callback = kit.ours.CkptStoreCallback(Repository(store))
    trainer = trainer_of(kit, callback, tmp_path / "out", max_steps=6, **SCORED)
    trainer.callback_handler.callbacks.insert(0, scored.callback)
    trainer.train()
    weights = (tmp_path / "out" / "checkpoint-2" / "model.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "out")
    repo = Repository(store)
    callback = kit.ours.CkptStoreCallback(repo)
    trainer = trainer_of(kit, callback, tmp_path / "new", max_steps=8, **SCORED)
    trainer.callback_handler.callbacks.insert(0, scored.callback)
    trainer.train(resume_from_checkpoint=callback.restore(trainer.args))
    assert trainer.state.best_model_checkpoint == str(tmp_path / "new" / "checkpoint-2")
    trainer.save_model(tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == weights
    repo.delete(2)
    kit.ours.CkptStoreCallback(repo).restore(tmp_path / "third")
    assert folders(tmp_path / "third") == [8]
    assert "best model" in caplog.text


def test_older_trainers_name_the_folder_of_the_best(kit: Any) -> None:
    """Before there was a ``best_global_step``, the number was in the name of the folder."""
    assert kit.ours._best_step(SimpleNamespace(best_model_checkpoint="out/checkpoint-12/")) == 12
    assert kit.ours._best_step(SimpleNamespace(best_model_checkpoint=None)) is None
    assert kit.ours._best_step(SimpleNamespace(best_model_checkpoint="out/final")) is None


def test_only_rank_zero_saves(kit: Any, tmp_path: Path) -> None:
    """Other ranks wait, and leave the store alone."""
    callback = kit.ours.CkptStoreCallback(Repository(MemoryStore()))
    state = SimpleNamespace(is_world_process_zero=False)
    callback.on_save(None, state, None)
    callback.on_train_end(None, state, None)
    assert callback.repo.epochs() == []


def test_an_error_at_the_end_is_raised(kit: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """P4: ``train`` does not return as if the last save had worked."""
    store = Failing()
    store.broken = True
    caplog.set_level(logging.CRITICAL, "ckptstore")
    with pytest.raises(AccessError):
        trainer_of(kit, kit.ours.CkptStoreCallback(Repository(store)), tmp_path / "out", max_steps=2).train()


def test_a_url_will_do(kit: Any, tmp_path: Path) -> None:
    """As docs/migrating.md shows it: from a URL to a resumed run."""
    for steps in (2, 4):
        callback = kit.ours.CkptStoreCallback(tmp_path / "repository")
        trainer = trainer_of(kit, callback, tmp_path / "out", max_steps=steps)
        trainer.train(resume_from_checkpoint=callback.restore(trainer.args))
        assert callback.repo.epochs()[-1] == steps
