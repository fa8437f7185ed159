"""One of several processes of ``jax.distributed``: the child of ``test_jax_processes.py``.

    python jax_process.py RANK COUNT PORT URL OPTIONS(json)

Saves a pytree on a mesh of all processes together with the others, restores it with other shardings, and prints what it
found as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ckptstore
from ckptstore.adapters.jax import ranks, restore

SHAPE, CHUNK = (512, 1024), 1 << 16
VALUES = np.random.default_rng(5).integers(0, 2**32, SHAPE, np.uint32)


def on_mesh(values: Any, sharding: Any) -> Any:
    """A global array of which each process makes its shards."""
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def pytree() -> dict[str, Any]:
    """Of sharded, partly and fully replicated arrays, local ones and plain values."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    whole = NamedSharding(mesh, P())
    return {
        "w": on_mesh(VALUES, NamedSharding(mesh, P("x", "y"))),
        "part": on_mesh(VALUES[:8].astype(jnp.bfloat16), NamedSharding(mesh, P(None, "y"))),
        "all": on_mesh(VALUES[8:9], whole),
        "keys": jax.jit(lambda: jax.random.split(jax.random.key(3), 8), out_shardings=NamedSharding(mesh, P("x")))(),
        "count": jax.jit(lambda: jnp.asarray(7), out_shardings=whole)(),
        "local": jnp.asarray(1.5),
        "name": "run",
    }


def shards_equal(array: Any, values: Any) -> bool:
    """Whether each shard that this process has is what it should be."""
    return all(np.asarray(s.data).tobytes() == values[s.index].tobytes() for s in array.addressable_shards)


def check(found: dict[str, Any], tree: dict[str, Any]) -> dict[str, bool]:
    """What came back as it was."""
    keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(3), 8)))
    return {
        "structure": jax.tree.structure(found) == jax.tree.structure(tree),
        "w": shards_equal(found["w"], VALUES),
        "part": shards_equal(found["part"], VALUES[:8].astype(jnp.bfloat16)),
        "all": shards_equal(found["all"], VALUES[8:9]),
        "keys": shards_equal(jax.random.key_data(found["keys"]), keys),
        "count": int(found["count"].addressable_data(0)) == 7 and found["count"].weak_type,
        "local": float(found["local"]) == 1.5 and found["name"] == "run",
        "shardings": all(
            a.sharding.is_equivalent_to(b.sharding, a.ndim)
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True)
            if isinstance(b, jax.Array)
        ),
    }


def main(rank: int, count: int, port: str, url: str, options: dict[str, Any]) -> None:
    """Save, restore in two ways, and say how it went."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8 // count)
    jax.distributed.initialize(f"127.0.0.1:{port}", count, rank)
    tree = pytree()
    read = [0]

    def meter(event: ckptstore.StoreEvent) -> None:
        if event.verb == "get" and "/chunks/" in event.key:
            read[0] += event.nbytes

    with ckptstore.open(
        url, storage_options=options or None, chunk_size=CHUNK, codec="raw", on_request=meter
    ) as repository:
        saved = repository.save(1, {"state": tree}, **ranks())
        later = repository.save_async(2, {"state": tree}, **ranks()).result()
        sent = later.report.bytes_sent if later.report is not None else -1
        same = check(restore(saved, {"state": tree})["state"], tree)

        # Rows by processes: this one needs half of the matrix, wherever the quarters of it lie.
        line = jax.make_mesh((8,), ("z",), axis_types=(jax.sharding.AxisType.Auto,))
        rows = jax.ShapeDtypeStruct(SHAPE, np.uint32, sharding=NamedSharding(line, P("z")))
        read[0] = 0
        found = restore(repository.checkpoint(2), {"state": {**tree, "w": rows}})["state"]
        same["rows"] = shards_equal(found["w"], VALUES) and found["w"].sharding == rows.sharding
    print(json.dumps({"same": same, "read": read[0], "sent": sent, "epochs": [1, 2]}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], json.loads(sys.argv[5]))
