"""Train with Keras 3. Kill it whenever you like and start it again: it goes on as if nothing had happened.

KERAS_BACKEND=jax python examples/train_keras.py runs/keras
KERAS_BACKEND=torch python examples/train_keras.py s3://bucket/run
"""

from __future__ import annotations

import argparse
import hashlib
import os
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import numpy as np

from ckptstore import KeepLast
from ckptstore.adapters.keras import SaveAndResume

FEATURES, CLASSES, EXAMPLES = 64, 10, 256


def make_model() -> Any:
    """A compiled model with dropout and normalization."""
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(CLASSES),
        ]
    )
    model.compile(keras.optimizers.AdamW(3e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class Tell(keras.callbacks.Callback):
    """Prints what goes on: where it starts, and each epoch when it is about to be saved."""

    started = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """How many epochs there were before the first one."""
        if not self.started:
            print(f"start {epoch}", flush=True)
        self.started = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """How many epochs there are now."""
        print(f"saving {epoch + 1} loss {logs['loss']:.4f}", flush=True)


def digest(model: Any) -> str:
    """A hash of all variables, without ckptstore."""
    found = hashlib.sha256()
    for variable in [*model.variables, *model.optimizer.variables]:
        found.update(f"{variable.path} {variable.dtype} {variable.shape}".encode() + variable.numpy().tobytes())
    return found.hexdigest()


def main(url: str, epochs: int) -> None:
    """Train up to a number of epochs from whatever is there."""
    keras.utils.set_random_seed(1)
    inputs = np.random.default_rng(2).normal(size=(EXAMPLES, FEATURES)).astype("float32")
    labels = inputs[:, :CLASSES].argmax(1)
    model = make_model()
    callbacks = [Tell(), SaveAndResume(url, keep=KeepLast(3))]
    model.fit(inputs, labels, batch_size=32, epochs=epochs, shuffle=True, callbacks=callbacks, verbose=0)
    print(f"end {digest(model)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="a folder, s3://bucket/prefix or gs://bucket/prefix")
    parser.add_argument("--epochs", type=int, default=20, help="how many epochs in all")
    arguments = parser.parse_args()
    main(arguments.url, arguments.epochs)
