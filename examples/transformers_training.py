"""A Hugging Face Trainer that can be killed at any time and started again: it ends as if nothing had happened.

    python examples/transformers_training.py runs/transformers out

Kill it, start it again (also with another, empty output folder), and compare the last lines.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import ckptstore
from ckptstore import KeepBest, KeepLast
from ckptstore.adapters.transformers import CkptStoreCallback


class Sentences(Dataset[Any]):
    """Tokens that are always the same."""

    def __init__(self, seed: int, size: int) -> None:
        self.tokens = torch.randint(64, (size, 12), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def make_model() -> Any:
    """A Llama of a few thousand weights, with dropout, so that random numbers matter."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        attention_dropout=0.1,
    )
    return LlamaForCausalLM(config)


def train(repo: ckptstore.Repository, output: str, epochs: int = 2, **options: Any) -> str:
    """Train from the newest checkpoint on, if there is one, to the end. Returns a digest of all that was learnt."""
    args = TrainingArguments(
        output,
        **{
            "num_train_epochs": epochs,
            "per_device_train_batch_size": 4,
            "learning_rate": 0.01,
            "eval_strategy": "steps",
            "eval_steps": 4,
            "save_steps": 4,
            "logging_steps": 4,
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "seed": 1,
            **options,
        },
    )
    callback = CkptStoreCallback(repo)
    trainer = Trainer(
        make_model(), args, train_dataset=Sentences(0, 40), eval_dataset=Sentences(1, 8), callbacks=[callback]
    )
    trainer.train(resume_from_checkpoint=callback.restore(args))
    moments = trainer.optimizer.state_dict()["state"].values()
    digest = hashlib.sha256()
    for value in [*trainer.model.state_dict().values(), *(value for state in moments for value in state.values())]:
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    url, folder = [*sys.argv[1:], *["runs/transformers", "out"][len(sys.argv) - 1 :]]
    with ckptstore.open(url, keep=KeepLast(2) | KeepBest("eval_loss", 1)) as repo:
        print(train(repo, folder))
        print("kept:", repo.epochs())
