"""Train with flax and optax. Kill it whenever you like and start it again: it goes on as if nothing had happened.

python examples/train_jax.py runs/flax
python examples/train_jax.py s3://bucket/run
"""

from __future__ import annotations

import argparse
import hashlib
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import ckptstore
from ckptstore.adapters.jax import restore

FEATURES, CLASSES, BATCH = 64, 10, 32


class Model(nn.Module):
    """Two layers, one of them in bfloat16, and dropout."""

    @nn.compact
    def __call__(self, inputs: Any, train: bool) -> Any:
        hidden = nn.relu(nn.Dense(256, param_dtype=jnp.bfloat16)(inputs))
        return nn.Dense(CLASSES)(nn.Dropout(0.1, deterministic=not train)(hidden))


def fresh_state() -> dict[str, Any]:
    """All that the training depends on, a record each: parameters, optimizer and step; the key of the dropout."""
    model = Model()
    params = model.init(jax.random.key(0), jnp.zeros((1, FEATURES)), train=False)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(3e-3, 1000)))
    return {"train": TrainState.create(apply_fn=model.apply, params=params, tx=optimizer), "rng": jax.random.key(1)}


@partial(jax.jit, donate_argnums=0)
def train_step(state: dict[str, Any], inputs: Any, labels: Any) -> tuple[dict[str, Any], Any]:
    """One step; the memory of the old state is used for the new one."""
    rng, dropout = jax.random.split(state["rng"])

    def loss_of(params: Any) -> Any:
        logits = state["train"].apply_fn(params, inputs, train=True, rngs={"dropout": dropout})
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = jax.value_and_grad(loss_of)(state["train"].params)
    return {"train": state["train"].apply_gradients(grads=grads), "rng": rng}, loss


def batch(step: int) -> tuple[Any, Any]:
    """The data of a step, from its number alone."""
    rng = np.random.default_rng(step)
    inputs = rng.normal(size=(BATCH, FEATURES)).astype(np.float32)
    return inputs, inputs[:, :CLASSES].argmax(1)


def digest(state: dict[str, Any]) -> str:
    """A hash of all bits of a state, without ckptstore."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        data = jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        found.update(f"{leaf.dtype} {data.weak_type} {leaf.shape}".encode() + np.asarray(data).tobytes())
    return found.hexdigest()


def main(url: str, steps: int, every: int) -> None:
    """Train up to a number of steps from whatever is there."""
    state = fresh_state()
    with ckptstore.open(url, keep=ckptstore.KeepLast(3)) as repo:
        ckpt = repo.latest(deep=True)
        if ckpt is not None:
            state = restore(ckpt, like=state)
        print(f"start {int(state['train'].step)}", flush=True)
        for step in range(int(state["train"].step), steps):
            state, loss = train_step(state, *batch(step))
            print(f"step {step + 1} loss {float(loss):.4f}", flush=True)
            if (step + 1) % every == 0:
                print(f"saving {step + 1}", flush=True)
                repo.save_async(step + 1, state)
    print(f"end {digest(state)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="a folder, s3://bucket/prefix or gs://bucket/prefix")
    parser.add_argument("--steps", type=int, default=200, help="how many steps in all")
    parser.add_argument("--every", type=int, default=20, help="steps between two checkpoints")
    arguments = parser.parse_args()
    main(arguments.url, arguments.steps, arguments.every)
