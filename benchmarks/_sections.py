"""What is measured. Each section returns rows: dicts of plain numbers and strings."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_lossscale as ols
from benchmarks import _measure, _models, _transformer, _ways
from optax_lossscale._arrays.finite import norm_and_all_finite

Row = dict[str, Any]
MILLION = 1_000_000
OPTIMIZERS = {
    "SGD": optax.sgd(1e-2, momentum=0.9),
    "AdamW": optax.adamw(1e-3),
    "Lion": optax.lion(1e-4),
}
DTYPES = ("float32", "bfloat16", "float16")
BY_HAND = "float16 by hand"


def _tree(size: int, leaves: int, dtype: Any, seed: int = 0) -> list[jax.Array]:
    """`size` random numbers in `leaves` matrices."""
    columns = 1 << max(0, (size // leaves).bit_length() // 2)
    shape = (max(1, size // leaves // columns), columns)
    rng = np.random.default_rng(seed)
    leaf = rng.standard_normal(shape, np.float32)
    return [jnp.array(leaf, dtype) for _ in range(leaves)]


class _Steps:
    """Compiled ways to take a step, which donate the same parameters and state by turns.

    They share them, as an array's place in memory can cost a tenth of a step's time.
    """

    def __init__(self, ways: dict[str, _ways.Way], size: int, leaves: int, dtype: str):
        self.size = size
        self.grads = _tree(size, leaves, dtype)
        self.arrays: list[jax.Array] = []
        self.programs, self.costs, self.trees = {}, {}, {}
        for name, way in ways.items():
            params = _tree(size, leaves, jnp.float32)
            carry = (params, jax.block_until_ready(way.init(params)))
            self.programs[name], self.costs[name] = _measure.compile_(
                way.step, *carry, self.grads, donate=(0, 1)
            )
            self._keep(name, carry)

    def _keep(self, name: str, carry: Any) -> None:
        """Puts the arrays where all ways find them, and the way's own scalars aside."""
        leaves, treedef = jax.tree.flatten(carry)
        self.arrays = [x for x in leaves if x.ndim]
        self.trees[name] = treedef, [None if x.ndim else x for x in leaves]

    def step(self, name: str) -> Any:
        treedef, scalars = self.trees[name]
        arrays = iter(self.arrays)
        leaves = [next(arrays) if x is None else x for x in scalars]
        carry = self.programs[name](*jax.tree.unflatten(treedef, leaves), self.grads)
        self._keep(name, carry)
        return carry

    def measure(self, rounds: int, **case: Any) -> list[Row]:
        cases = {name: functools.partial(self.step, name) for name in self.programs}
        times = _measure.interleave(cases, rounds, _ways.PLAIN)
        parameter_bytes = 4 * self.size
        rows = [
            case | {"way": name} | times[name] | self.costs[name]
            for name in self.programs
        ]
        for row in rows:
            row["temp_share"] = row["temp_bytes"] / parameter_bytes
        return rows


def step(quick: bool) -> list[Row]:
    """The optimizer step alone, from given gradients to new parameters: 100 leaves."""
    size, count, rounds = (MILLION, 10, 5) if quick else (32 * MILLION, 100, 40)
    rows = []
    for optimizer, inner in OPTIMIZERS.items():
        for dtype in DTYPES:
            steps = _Steps(_ways.ours(inner) | _ways.peers(inner), size, count, dtype)
            rows += steps.measure(rounds, optimizer=optimizer, dtype=dtype, size=size)
    return rows


def sizes(quick: bool) -> list[Row]:
    """AdamW in 100 leaves, from 1M to 128M parameters, float32 gradients."""
    rows = []
    for size in (
        (MILLION,) if quick else (MILLION, 8 * MILLION, 32 * MILLION, 128 * MILLION)
    ):
        steps = _Steps(
            _ways.ours(OPTIMIZERS["AdamW"]), size, 10 if quick else 100, "float32"
        )
        rounds = 5 if quick else max(11, min(200, 800 * MILLION // size))
        rows += steps.measure(rounds, size=size)
    return rows


def leaves(quick: bool) -> list[Row]:
    """AdamW, 8M parameters in 1 to 4000 leaves: time to compile and to run."""
    inner, rows = OPTIMIZERS["AdamW"], []
    for count in (1, 10) if quick else (1, 10, 100, 400, 1000, 4000):
        ways = _ways.ours(inner)
        if count > 1000:  # a minute or two each
            ways = {name: ways[name] for name in (_ways.PLAIN, _ways.DYNAMIC)}
        if count <= 400:  # beyond, the peers compile for too long
            ways |= _ways.peers(inner)
        steps = _Steps(ways, MILLION if quick else 8 * MILLION, count, "float32")
        rows += steps.measure(5 if quick else 25, leaves=count)
    return rows


def check(quick: bool) -> list[Row]:
    """Is everything finite? 32M numbers in 100 leaves."""
    checks: dict[str, Callable[[Any], Any]] = {
        "all_finite": ols.all_finite,
        "all_finite and the norm": norm_and_all_finite,
        "all(isfinite(x))": lambda tree: jnp.array(
            [jnp.isfinite(x).all() for x in tree]
        ).all(),
        "sum(x * 0) == 0": lambda tree: jnp.array(
            [jnp.sum(x * 0) == 0 for x in tree]
        ).all(),
        "jmp.all_finite": jmp.all_finite,
        "optax.tree.norm": lambda tree: jnp.isfinite(optax.tree.norm(tree)),
    }
    size, rows = MILLION if quick else 32 * MILLION, []
    for dtype in DTYPES:
        tree = _tree(size, 100, dtype)
        programs, costs = {}, {}
        for name, function in checks.items():
            programs[name], costs[name] = _measure.compile_(function, tree)
        cases = {name: functools.partial(f, tree) for name, f in programs.items()}
        times = _measure.interleave(cases, 5 if quick else 25, "all_finite")
        nbytes = sum(x.nbytes for x in tree)
        rows += [
            {
                "dtype": dtype,
                "check": name,
                "gb_per_s": nbytes / times[name]["ms"] / 1e6,
            }
            | times[name]
            | costs[name]
            for name in checks
        ]
    return rows


def train_step(quick: bool) -> list[Row]:
    """A transformer of two blocks of width 128, from a batch to new parameters."""
    tokens = _transformer.tokens(16)
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    rows = []
    for dtype in ("float32", "float16"):
        loss_fn = functools.partial(_loss, dtype=jnp.dtype(dtype))

        def plain(params, state, tokens, loss_fn=loss_fn):
            loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
            updates, state = inner.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        def ours(loss_scale, loss_fn=loss_fn, **options):
            tx = ols.with_loss_scale(inner, loss_scale, **options)

            def step(params, state, tokens):
                loss, grads = ols.value_and_scaled_grad(loss_fn, state)(params, tokens)
                params, state = tx.apply_gradients(grads, state, params)
                return params, state, loss

            return tx.init, step

        ways = {
            _ways.PLAIN: (inner.init, plain),
            "dynamic": ours("dynamic"),
            "fixed": ours(128),
            "fixed, skip=None": ours(128, skip=None),
            "None, skip=None": ours(None, skip=None),
        }
        fresh = lambda: _transformer.init(128, blocks=2)
        rows += _train(ways, fresh, tokens, 5 if quick else 150, dtype=dtype)
    return rows


def _loss(params: Any, tokens: jax.Array, *, dtype: Any):
    return _transformer.uncast_loss(optax.tree.cast(params, dtype), tokens) / 1024


def compiling(quick: bool) -> list[Row]:
    """The time until a first step can run, and a first gradient under `autocast`."""
    count, shapes, width, rounds = (10, 5, 64, 1) if quick else (400, 40, 512, 5)
    inner, rows = OPTIMIZERS["AdamW"], []
    peers = _ways.peers(inner)
    ways = {name: _ways.ours(inner)[name] for name in (_ways.PLAIN, *_ways.DOORS)}
    ways |= {
        "lax.cond by hand": _ways.cond(inner),
        _ways.APPLY_IF_FINITE: peers.pop(_ways.APPLY_IF_FINITE),
    }

    sizes = [8 * (1 + i % shapes) for i in range(count)]
    grads = [jax.ShapeDtypeStruct((size, 256), jnp.float32) for size in sizes]
    cases = {
        name: (way.step, _carried(way, grads), grads) for name, way in ways.items()
    }
    rows += _compiled(cases, rounds, f"AdamW, {count} leaves of {shapes} shapes")

    params = jax.eval_shape(lambda: _transformer.init(width))
    tokens = jax.eval_shape(lambda: _transformer.tokens(4))
    train = lambda way: way.train(_transformer.loss)
    cases = {
        name: (train(way), _carried(way, params), tokens)
        for name, way in (ways | peers).items()
    }
    rows += _compiled(cases, rounds, "a whole step")

    losses = {
        "float32": _transformer.float32_loss,
        BY_HAND: _transformer.loss,
        "autocast": ols.autocast(_transformer.float32_loss),
    }
    cases = {
        name: (_gradient(loss), (params, ()), tokens) for name, loss in losses.items()
    }
    return rows + _compiled(cases, rounds, "a gradient")


def _carried(way: _ways.Way, params: Any) -> tuple[Any, Any]:
    return params, jax.eval_shape(way.init, params)


def _gradient(loss: Callable) -> Callable:
    return lambda params, _, tokens: jax.value_and_grad(loss)(params, tokens)


def _compiled(cases: dict[str, tuple], rounds: int, program: str) -> list[Row]:
    """The time to compile each case, `(function, (params, state), batch)`."""
    calls = {
        name: (f, (*carried, batch)) for name, (f, carried, batch) in cases.items()
    }
    times = _measure.interleave_compiling(calls, rounds, next(iter(cases)))
    return [{"program": program, "way": name} | times[name] for name in cases]


def whole_step(quick: bool) -> list[Row]:
    """A float16 transformer of four blocks, from a batch to new parameters, every way."""
    inner = OPTIMIZERS["AdamW"]
    ways = {name: (way, _transformer.loss) for name, way in _ways.whole(inner).items()}
    ways["apply_gradients, autocast"] = _ways.in_float16(inner)["autocast"]
    width, rounds = (64, 5) if quick else (512, 25)
    steps = {name: (way.init, way.train(loss)) for name, (way, loss) in ways.items()}
    fresh = lambda: _transformer.init(width)
    rows = _train(steps, fresh, _transformer.tokens(4), rounds)
    parameter_bytes = sum(x.nbytes for x in jax.tree.leaves(fresh()))
    for row in rows:
        row["temp_share"] = row["temp_bytes"] / parameter_bytes
    return rows


def _train(
    ways: dict[str, tuple[Callable, Callable]],
    fresh: Callable[[], Any],
    tokens: jax.Array,
    rounds: int,
    **case: Any,
) -> list[Row]:
    """Whole steps, each from an `init` and a `step(params, state, tokens)`."""
    programs, costs, carried = {}, {}, {}
    for name, (init, function) in ways.items():
        params = fresh()
        carried[name] = (params, init(params))
        programs[name], costs[name] = _measure.compile_(
            function, *carried[name], tokens, donate=(0, 1)
        )

    def run(name):
        *carried[name], out = programs[name](*carried[name], tokens)
        return out, carried[name]

    cases = {name: functools.partial(run, name) for name in ways}
    times = _measure.interleave(cases, rounds, _ways.PLAIN)
    return [case | {"way": name} | times[name] | costs[name] for name in ways]


def models(quick: bool) -> list[Row]:
    """Gradients of models in float32, cast by hand and under `autocast`; not on a CPU."""
    # Which has no float16 to compute in, so that nothing would be measured.
    on_cpu = jax.default_backend() == "cpu"
    tiny = functools.partial(
        _models.transformer, width=64, length=32, batch=2, layers=1
    )
    there = {"tiny": tiny} if quick else {} if on_cpu else _models.MODELS
    device = jax.devices()[0]
    if device.platform == "gpu" and float(device.compute_capability) >= 8:
        there = there | _models.ON_GPU
    rows = []
    for name, model in there.items():
        ways = {BY_HAND: (model(_models.by_hand), lambda loss: loss)}
        ways["autocast"] = (model(_models.left), ols.autocast)
        if name not in _models.ON_GPU:
            ways["float32"] = (model(_models.left), lambda loss: loss)
        programs, costs = {}, {}
        batch = _filled(ways[BY_HAND][0])
        for way, (it, cast) in ways.items():
            program, costs[way] = _measure.compile_(
                jax.value_and_grad(cast(it.loss)), *batch
            )
            programs[way] = functools.partial(program, *batch)
        times = _measure.interleave(programs, 5 if quick else 25, BY_HAND)
        rows += [{"model": name, "way": way} | times[way] | costs[way] for way in ways]
    return rows


def _filled(model: _models.Model) -> tuple[Any, ...]:
    """Parameters and a batch of small random numbers."""
    rng = np.random.default_rng(0)
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    of = lambda x: (
        rng.normal(0, 0.02, x.shape) if is_float(x) else rng.integers(0, 8, x.shape)
    )
    return jax.tree.map(
        lambda x: jnp.asarray(of(x), x.dtype), (model.params, *model.batch)
    )


def devices(quick: bool) -> list[Row]:
    """AdamW, 8M parameters, on all devices: replicated under `shard_map`, sharded under `jit`."""
    mesh = jax.make_mesh(
        (jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    inner, rows = OPTIMIZERS["AdamW"], []
    shape = (jax.device_count() * 64, 64 if quick else 2048)

    def replicated(loss_scale):
        tx = ols.with_loss_scale(inner, loss_scale, axis_name="data")

        def step(params, state, grads):
            return tx.apply_gradients(jax.lax.pmean(grads, "data"), state, params)

        return tx.init, jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P())

    def sharded(loss_scale):
        way = _ways.apply_gradients(inner, loss_scale)
        return way.init, way.step

    for placement, way, spec in (
        ("replicated", replicated, P()),
        ("sharded", sharded, P("data")),
    ):
        place = NamedSharding(mesh, spec)
        fresh = jax.jit(
            lambda: [jnp.full(shape, 1.0 + i) for i in range(16)], out_shardings=place
        )
        programs, costs, carried, grads = {}, {}, {}, fresh()
        for name, loss_scale in {_ways.PLAIN: None, "dynamic": "dynamic"}.items():
            init, step = way(loss_scale)
            params = fresh()
            shardings = jax.tree.map(
                lambda x, place=place: place if x.ndim else NamedSharding(mesh, P()),
                jax.eval_shape(init, params),
            )
            carried[name] = (params, jax.jit(init, out_shardings=shardings)(params))
            programs[name], costs[name] = _measure.compile_(
                step, *carried[name], grads, donate=(0, 1)
            )

        def run(name, programs=programs, carried=carried, grads=grads):
            carried[name] = programs[name](*carried[name], grads)
            return carried[name]

        cases = {name: functools.partial(run, name) for name in programs}
        times = _measure.interleave(cases, 5 if quick else 50, _ways.PLAIN)
        rows += [
            {"devices": jax.device_count(), "placement": placement, "way": name}
            | times[name]
            | costs[name]
            for name in programs
        ]
    return rows


def bandwidth(quick: bool) -> list[Row]:
    """How fast this machine reads, and reads and writes, 32M float32 numbers in 100 leaves."""
    tree = _tree(MILLION if quick else 32 * MILLION, 100, "float32")
    nbytes = sum(x.nbytes for x in tree)
    read, _ = _measure.compile_(
        lambda tree: jnp.array([x.sum() for x in tree]).sum(), tree
    )
    write, _ = _measure.compile_(lambda tree: [x + 1 for x in tree], tree, donate=(0,))
    carried = [_tree(MILLION if quick else 32 * MILLION, 100, "float32")]

    def copy():
        carried[0] = write(carried[0])
        return carried[0]

    times = _measure.interleave({"read": lambda: read(tree), "copy": copy}, 25, "read")
    moved = {"read": nbytes, "copy": 2 * nbytes}
    return [
        {"what": k, "gb_per_s": moved[k] / t["ms"] / 1e6} | t for k, t in times.items()
    ]


SECTIONS = {
    f.__name__: f
    for f in (
        bandwidth,
        step,
        sizes,
        leaves,
        check,
        train_step,
        compiling,
        whole_step,
        models,
        devices,
    )
}
