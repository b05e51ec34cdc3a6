"""Data-parallel float16 training on several processes, which apply or skip each step together.

On one machine, with two processes on its CPU:

    python examples/distributed.py --processes 2

On a cluster, once on each host, with what `jax.distributed.initialize` does not find out itself:

    python examples/distributed.py --coordinator HOST:PORT --processes N --rank I

`--checkpoint DIR` saves every fifth step there, and continues from the last one saved.
"""

import argparse
import functools
import hashlib
import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols

WIDTH = 32


def loss_fn(params, x, y):
    """A small network's squared error."""
    return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"] - y) ** 2)


def batch(step, rank, overflow):
    """This process's examples; gradients overflow on those of the step and rank in `overflow`."""
    rng = np.random.default_rng([step, rank])
    x = rng.standard_normal((8, WIDTH), np.float32)
    return x, np.sin(x[:, :4]) * (1e6 if (step, rank) == overflow else 1)


def compare(loss_scale):
    """Fails unless all processes have configured the same loss scale.

    Each compiles the step for itself, and a different growth interval on one of them would
    silently give it different parameters.
    """
    config = json.dumps(loss_scale.get_config(), sort_keys=True).encode()
    digest = np.frombuffer(hashlib.sha256(config).digest(), np.uint8)
    multihost_utils.assert_equal(
        digest, f"process {jax.process_index()} has {config.decode()}"
    )


def optimizer_and_step(mesh, loss_scale):
    """The optimizer, and the compiled training step on all devices of a mesh."""
    tx = ols.with_loss_scale(optax.adamw(1e-2), loss_scale, axis_name="data")

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P(), P("data"), P("data")),
        out_specs=P(),
    )
    def train_step(params, state, x, y):
        # The mean is taken in the loss: gradients with respect to replicated parameters
        # come out of shard_map summed over the replicas, so this makes them the mean's.
        mean_loss = lambda *args: jax.lax.pmean(ols.autocast(loss_fn)(*args), "data")
        loss, scaled_grads = ols.value_and_scaled_grad(mean_loss, state)(params, x, y)
        params, state = tx.apply_gradients(scaled_grads, state, params, value=loss)
        return params, state, loss

    return tx, train_step


def initial(tx):
    """The parameters and the optimizer's state before the first step."""
    keys = jax.random.split(jax.random.key(0))
    shapes = {"in": (WIDTH, 64), "out": (64, 4)}
    params = {
        k: jax.random.normal(key, shapes[k]) / 8
        for k, key in zip(shapes, keys, strict=True)
    }
    return params, tx.init(params)


def say(line):
    """Prints a line in one write, as `print` alone does not when Python is unbuffered.

    All processes write to the same place, and a second line could come between text and newline.
    """
    print(line + "\n", end="", flush=True)


def train(steps, growth_interval, overflow, checkpoint):
    """Trains on all processes; returns the parameters and the optimizer's state."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    spread, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    loss_scale = ols.DynamicLossScale(growth_interval=growth_interval)
    compare(loss_scale)
    tx, train_step = optimizer_and_step(mesh, loss_scale)
    params, state = jax.device_put(initial(tx), everywhere)

    manager, start = None, 0
    if checkpoint:
        import orbax.checkpoint as ocp

        manager = ocp.CheckpointManager(pathlib.Path(checkpoint).absolute())
        if (latest := manager.latest_step()) is not None:
            like = jax.tree.map(ocp.utils.to_shape_dtype_struct, (params, state))
            params, state = manager.restore(latest, args=ocp.args.StandardRestore(like))
            start = latest + 1

    to_global = functools.partial(jax.make_array_from_process_local_data, spread)
    for step in range(start, steps):
        x, y = map(to_global, batch(step, jax.process_index(), overflow))
        params, state, loss = train_step(params, state, x, y)
        if jax.process_index() == 0:
            say(
                f"step {step}: loss {loss:.4f}, scale {state.loss_scale():g}, "
                f"{'applied' if state.should_apply else 'skipped'}"
            )
        if manager and step % 5 == 4:
            manager.save(step, args=ocp.args.StandardSave((params, state)))
    if manager:
        manager.wait_until_finished()
        manager.close()
    return params, state


def start_here(processes, arguments):
    """Starts all processes on this machine; returns the first exit code that is not 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, __file__, *arguments, "--coordinator", address]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    ranks = [
        subprocess.Popen([*command, "--rank", str(i)], env=environment)
        for i in range(processes)
    ]
    return max(abs(rank.wait()) for rank in ranks)


def main():
    """Starts the processes, or is one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, help="how many")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0")
    parser.add_argument("--rank", type=int, help="which of them this is")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--growth-interval", type=int, default=10, help="of the loss scale"
    )
    parser.add_argument("--checkpoint", metavar="DIR")
    parser.add_argument(
        "--heartbeat",
        type=int,
        default=100,
        help="seconds of silence that end the others",
    )
    parser.add_argument(
        "--overflow",
        type=int,
        nargs=2,
        metavar=("STEP", "RANK"),
        help="where to plant one",
    )
    options = parser.parse_args()
    if options.processes and options.rank is None and options.coordinator is None:
        sys.exit(start_here(options.processes, sys.argv[1:]))
    jax.distributed.initialize(
        options.coordinator,
        options.processes,
        options.rank,
        heartbeat_timeout_seconds=options.heartbeat,
    )
    overflow = tuple(options.overflow) if options.overflow else None
    params, state = train(
        options.steps, options.growth_interval, overflow, options.checkpoint
    )
    digest = hashlib.sha256(
        b"".join(np.asarray(p).tobytes() for p in jax.tree.leaves(params))
    )
    say(
        f"process {jax.process_index()}: parameters {digest.hexdigest()[:16]}, scale "
        f"{state.loss_scale():g}, skipped {state.skipped_steps}"
    )


if __name__ == "__main__":
    main()
