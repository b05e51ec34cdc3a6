"""Random programs, and whether autocast computes them as float32 does.

A program is made of a seed, as Python source, so that a finding can be read, shrunk and run again:

    python tests/autocast/programs.py --minutes 60         # look for findings, each one shrunk
    python tests/autocast/programs.py --seed 1234          # print and try one program
    python tests/autocast/programs.py --seed 1234 --shrink

How far autocast may be from float32 is measured, program by program: the program and its gradient
run in float32 with what every product takes and gives moved at random by as much as float16 rounds
it. Programs that this moves far are ill-conditioned, and are left out, as are those with products
above the range of float16. What lies between products may be as large as float32 allows.

A finding of the kind "follows" is none if the results of plain arithmetic are moved, or have to be
in range, too: autocast lets those follow their operands into 16 bits.
"""

import argparse
import collections
import functools
import itertools
import math
import pathlib
import re
import sys
import time
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import P, lax
from jax.extend.core import Literal
from jax.sharding import AxisType

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from against_float32 import (  # noqa: E402
    EXPONENTS,
    equations,
    relative_error,
    scaled_value_and_grad,
    sums_in_16_bits,
)

import optax_lossscale as ols  # noqa: E402
from optax_lossscale._diagnosis.equation import (  # noqa: E402
    in_float32,
    is_compared,
    widened,
)
from optax_lossscale._programs.enter import enter, is_entered  # noqa: E402
from optax_lossscale._programs.products import is_product  # noqa: E402
from optax_lossscale._programs.values import (  # noqa: E402
    FLOAT32,
    astypes,
    dtypes_in,
    is_inexact,
    is_narrow_dtype,
)
from optax_lossscale._programs.versions import (  # noqa: E402
    bind,
    constants,
    name_of,
    open_jaxpr,
)
from optax_lossscale._programs.walk import result_programs  # noqa: E402

ROUNDING = 2.0**-11  # of float16, relative


def evaluate(program, args, compute):
    """The results of a program in float32, each equation's computed by a rule."""
    return evaluated(program, compute)(args)


def evaluated(program, compute):
    """How to run a program equation by equation, in float32."""
    jaxpr = open_jaxpr(program)

    def dtypes(variables):
        dtypes = dtypes_in(variables)
        return [FLOAT32 if is_narrow_dtype(x) else x for x in dtypes]

    def call(args):
        variables = [*jaxpr.constvars, *jaxpr.invars]
        xs = astypes([*constants(program), *args], dtypes(variables))
        values = dict(zip(variables, xs, strict=True))

        def read(variables):
            xs = [
                jnp.asarray(v.val) if isinstance(v, Literal) else values[v]
                for v in variables
            ]
            return astypes(xs, dtypes(variables))

        for eqn in jaxpr.eqns:
            ins = read(eqn.invars)
            has_rule = name_of(eqn) in ("custom_jvp_call", "custom_vjp_call")
            if has_rule or is_entered(eqn):
                inner = [evaluated(p, compute) for p in result_programs(eqn)]
                outs = inner[0](ins) if has_rule else enter(eqn, ins, inner)
            else:
                outs = compute(eqn, ins)
            values.update(zip(eqn.outvars, outs, strict=True))
        return read(jaxpr.outvars)

    return call


def widely(eqn, ins):
    """The results of an equation in float32, wherever possible."""
    as_traced = astypes(ins, dtypes_in(eqn.invars))
    if name_of(eqn) in ("pvary", "psum_invariant"):
        return bind(eqn, ins)
    outs = bind(eqn, as_traced)
    if not is_compared(eqn):
        return [widened(x) for x in outs]
    return in_float32(eqn, as_traced, ins, outs)


SMALLEST = 2.0**-25  # half its smallest number
FREE = 2.0**-9  # an error below which nothing is asked
ILL = 0.03  # moved by more than this, a program says nothing
LARGEST = 3e4
MANY = 64


# --- what the programs are made of ---


class Line(NamedTuple):
    """`name = text`, where `text` mentions variables; its result has a shape."""

    name: str
    text: str
    shape: tuple[int, ...]


class Function(NamedTuple):
    """`name(p, v0)`, of the parameters and an array."""

    name: str
    shape: tuple[int, ...]
    lines: tuple[Line, ...]
    others: tuple[str, ...] = ()  # what it returns beside the last

    @property
    def results(self):
        last = self.lines[-1].name if self.lines else "v0"
        names = [
            name for name in self.others if name in {line.name for line in self.lines}
        ]
        return list(dict.fromkeys([last, *names]))

    def source(self):
        lines = [f"    {line.name} = {line.text}" for line in self.lines]
        return "\n".join(
            [
                f"def {self.name}(p, v0):",
                *lines,
                f"    return {', '.join(self.results)}",
            ]
        )


class Program(NamedTuple):
    seed: int
    functions: tuple[Function, ...]  # the last is the program
    # shapes, and how large the numbers are
    params: dict[str, tuple[tuple[int, ...], float]]
    shape: tuple[int, ...]
    size: float

    def source(self):
        return "\n\n".join(f.source() for f in self.functions)

    def function(self):
        """The function of parameters and an input: a scalar, and what else it returns."""
        names = dict(PIECES)
        exec(compile(self.source(), f"<program {self.seed}>", "exec"), names)
        fun = names[self.functions[-1].name]

        def loss(p, x):
            ys = fun(p, x)
            rng = np.random.default_rng(self.seed)
            signs = lambda y: rng.choice([-1.0, 1.0], y.shape).astype(np.float32)
            ys = ys if isinstance(ys, tuple) else (ys,)
            return sum(jnp.log(jnp.mean(jnp.square(y - signs(y)))) for y in ys)

        return loss

    def arguments(self):
        rng = np.random.default_rng(self.seed)
        number = lambda shape, size: jnp.asarray(
            rng.standard_normal(shape).astype(np.float16) * size, jnp.float32
        )
        x = number(self.shape, self.size)
        p = {
            name: number(shape, size)
            for name, (shape, size) in sorted(self.params.items())
        }
        return p, x

    def __str__(self):
        p = ", ".join(f"{k}: {v[0]} * {v[1]:.3g}" for k, v in self.params.items())
        return (
            f"# seed {self.seed}; x: {self.shape} * {self.size}; {p}\n{self.source()}"
        )


def pruned(program):
    """Without lines, functions and parameters that nothing uses."""
    functions = {}
    wanted = {program.functions[-1].name}
    for f in reversed(program.functions):
        if f.name not in wanted:
            continue
        used, kept = set(f.results), []
        for line in reversed(f.lines):
            if line.name in used:
                kept.append(line)
                used |= set(re.findall(r"\bv\d+\b", line.text))
                wanted |= set(re.findall(r"\bf\d+\b", line.text))
        functions[f.name] = f._replace(lines=tuple(reversed(kept)))
    kept = tuple(functions[f.name] for f in program.functions if f.name in functions)
    text = "\n".join(f.source() for f in kept)
    used = set(re.findall(r'p\["(w\d+)"\]', text))
    params = {k: v for k, v in program.params.items() if k in used}
    return program._replace(functions=kept, params=params)


def shrunk(program, fails, tries=200):
    """A smaller program that fails as well."""
    tries = itertools.count(tries, -1)
    changed = True
    while changed:
        changed = False
        for smaller in smaller_ones(program):
            if next(tries) <= 0:
                return program
            if fails(smaller):
                program, changed = smaller, True
                break
    return program


def smaller_ones(program):
    """Programs with a line less."""
    size = lambda p: sum(len(f.lines) for f in p.functions)
    for n, f in enumerate(program.functions):
        put = lambda new, n=n: pruned(
            program._replace(
                functions=(*program.functions[:n], new, *program.functions[n + 1 :])
            )
        )
        is_last = n == len(program.functions) - 1
        for name in f.results[1:]:
            others = tuple(other for other in f.others if other != name)
            yield put(f._replace(others=others))
        for end in range(1, len(f.lines)):
            if is_last or f.lines[end - 1].shape == f.lines[-1].shape:
                yield put(f._replace(lines=f.lines[:end]))
        for i, line in enumerate(f.lines):
            before = [("v0", f.shape), *((b.name, b.shape) for b in f.lines[:i])]
            for name, shape in reversed(before):
                if shape == line.shape and line.text != name:
                    lines = [*f.lines[:i], line._replace(text=name), *f.lines[i + 1 :]]
                    new = put(f._replace(lines=tuple(lines)))
                    if size(new) <= size(program) and new.source() != program.source():
                        yield new
                    break


# --- helpers that a program may call ---


def scaled_jvp(f):
    """With a custom derivative, which is not the function's own."""

    @jax.custom_jvp
    def g(p, v):
        return f(p, v)

    @g.defjvp
    def rule(primals, tangents):
        y, t = jax.jvp(f, primals, tangents)
        return y, t * 1.5

    return g


def scaled_vjp(f):
    @jax.custom_vjp
    def g(p, v):
        return f(p, v)

    def fwd(p, v):
        return f(p, v), (p, v)

    def bwd(saved, ct):
        return jax.vjp(f, *saved)[1](ct * 1.5)

    g.defvjp(fwd, bwd)
    return g


def kept_vjp(f):
    """A custom derivative that keeps the function of the forward pass."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def g(n, p, v):
        return f(p, v) * n

    def fwd(n, p, v):
        return jax.vjp(lambda p, v: f(p, v) * n, p, v)

    g.defvjp(fwd, lambda n, vjp, ct: vjp(ct * n))
    return functools.partial(g, 2)


@jax.custom_vjp
def normalized_ct(v):
    """Does nothing, but its backward pass is not linear, as that of a clipped gradient."""
    return v


normalized_ct.defvjp(
    lambda v: (v, None), lambda _, ct: (ct / (1e-3 + jnp.linalg.norm(ct)),)
)


def by_scan(f, unroll=1):
    return lambda p, v: lax.scan(
        lambda c, i: (0.5 * c + f(p, c), jnp.sum(c)), v, jnp.arange(3), unroll=unroll
    )[0]


def by_scan_of_rows(f):
    """Of rows, with the result of each as an output, in reverse."""
    return lambda p, v: lax.scan(
        lambda c, row: (0.5 * c + row, f(p, (row + c)[None])[0]), v[0], v, reverse=True
    )[1]


def by_fori(f):
    return lambda p, v: lax.fori_loop(
        0, 3, lambda i, c: 0.5 * c + f(p, c) * (i + 1) / 3, v
    )


def by_while(f):
    """What a loop finds that is not differentiated."""

    def looped(p, v):
        start = (0, lax.stop_gradient(v))
        fixed = lax.stop_gradient(p)
        step = lambda state: (state[0] + 1, 0.5 * state[1] + f(fixed, state[1]))
        return v + lax.while_loop(lambda state: state[0] < 3, step, start)[1]

    return looped


def by_cond(f, g):
    return lambda p, v: lax.cond(jnp.sum(v) > -1e30, f, g, p, v)


def by_switch(f, g):
    return lambda p, v: lax.switch(v.shape[0] % 3, [g, f, lambda p, v: v * 2], p, v)


def by_traced_switch(f, g):
    return lambda p, v: lax.switch(jnp.argmax(v[:, 0] * 0), [f, g], p, v)


def by_rows(f):
    return lambda p, v: jax.vmap(lambda row: f(p, row[None])[0])(v)


def by_map(f):
    return lambda p, v: lax.map(lambda row: f(p, row[None])[0], v)


def remat(f, policy):
    policies = jax.checkpoint_policies
    chosen = [None, policies.dots_saveable, policies.everything_saveable,
              policies.dots_with_no_batch_dims_saveable, policies.nothing_saveable]  # fmt: skip
    return jax.checkpoint(f, policy=chosen[policy])


def jitted(f):
    return jax.jit(f)


def twice_jitted(f):
    g = jax.jit(lambda p, v: f(p, v) + v)
    return lambda p, v: g(p, jax.jit(jnp.tanh)(v))


def descended(f):
    """A step of gradient descent inside, as in meta-learning."""
    return lambda p, v: v - 0.1 * jax.grad(lambda v: jnp.sum(f(p, v) ** 2))(v)


SENDS = (
    lambda v: lax.all_gather(v, "i")[1],
    lambda v: lax.all_gather(v, "i", tiled=True)[: v.shape[0]],
    lambda v: lax.ppermute(v, "i", [(0, 1), (1, 0)]),
    lambda v: lax.all_to_all(jnp.stack([v, -v]), "i", 0, 0)[1],
    lambda v: lax.psum(v, "i") / 2,
    lambda v: lax.psum_scatter(jnp.stack([v, 2 * v]), "i") / 3,
)


def sent(f, how):
    """On two devices, of what the one sends to the other."""

    def on_devices(p, v):
        mesh = jax.make_mesh((2,), ("i",), (AxisType.Auto,), devices=jax.devices()[:2])
        of_each = lambda p, v: f(p, SENDS[how](v))
        specs = {"in_specs": (P(), P("i")), "out_specs": P("i")}
        of_both = jax.shard_map(of_each, mesh=mesh, **specs)
        one, other = jnp.split(of_both(p, jnp.concatenate([v, v[::-1]])), 2)
        return one + 0.5 * other

    return on_devices


def recurrence(v, w):
    combine = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])
    return lax.associative_scan(combine, (jax.nn.sigmoid(v @ w), v))[1]


def attention(q, k, v):
    # or the products may be above 65504
    unit = lambda v: v / (1e-3 + jnp.max(jnp.abs(v)))
    scores = 5 * unit(q) @ unit(k).T
    mask = jnp.arange(q.shape[0])[:, None] >= jnp.arange(k.shape[0])
    scores = jnp.where(mask, scores, -1e9)
    return jax.nn.softmax(scores) @ v


def conv(v, w, **options):
    """Over the rows of v; w: (width, channels in, channels out)."""
    numbers = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(v[None], w, dimension_numbers=numbers, **options)[0]


def mask(seed, *shape):
    return np.random.default_rng(seed).random(shape) > 0.4


def ids(seed, n, below):
    return np.random.default_rng(seed).integers(0, below, n)


def table(seed, *shape):
    return (
        np.random.default_rng(seed)
        .standard_normal(shape)
        .astype(np.float16)
        .astype("f")
    )


PIECES = {
    f.__name__: f
    for f in (
        scaled_jvp, scaled_vjp, kept_vjp, normalized_ct, by_scan, by_scan_of_rows, by_fori,
        by_while, by_cond, by_switch, by_traced_switch, by_rows, by_map, remat, jitted,
        twice_jitted, descended, sent, recurrence, attention, conv, mask, ids, table,
    )
} | {"jax": jax, "jnp": jnp, "lax": lax, "np": np}  # fmt: skip

# `{v}` is an array of shape (n, d), `{u}` another one of the same shape. Those that
# keep it:
KEEPING = """
jnp.tanh({v})
jax.nn.sigmoid({v})
jax.nn.gelu({v})
jax.nn.gelu({v}, approximate=False)
jax.nn.silu({v})
jax.nn.relu({v})
jax.nn.softplus({v})
jax.nn.elu({v})
jax.nn.leaky_relu({v})
jax.nn.hard_tanh({v} / 3) * 3
lax.erf({v})
jnp.exp(-({v} ** 2))
jnp.exp(jnp.minimum({v}, 2.0))
jnp.exp(jnp.tanh({v})) - 1
jnp.expm1(jnp.tanh({v}))
jnp.log(1 + {v} ** 2)
jnp.log1p(jnp.abs({v}))
jnp.log(jax.nn.sigmoid({v}) + 1e-8)
jnp.log(1 - jnp.tanh({v}) ** 2 + 1e-6)
jnp.sqrt({v} ** 2 + 1)
jnp.sign({v}) * jnp.sqrt(jnp.abs({v}) + 1e-6)
(jnp.abs({v}) + 0.1) ** 1.7
{v} ** 3 / (1 + {v} ** 2)
jnp.power(2.0, jnp.tanh({v}))
lax.rsqrt({v} ** 2 + 1e-3)
{v} / (1 + jnp.abs({v}))
jnp.log(1.000001 - jnp.clip({v}, -1, 1) ** 2)
jnp.log(jnp.clip(jnp.abs({v}), 1e-7, 1 - 1e-7))
1 / (1.001 - jnp.clip({v}, -1, 1))
jnp.sin(30 * {v})
({v} - 0.9 * {u}) * 30
1 / (1 + {v} ** 2)
lax.integer_pow({v}, 2) - {v} * {v} * 0.5
jnp.sin({v})
jnp.cos({v}) * 2
jnp.arctan({v})
jnp.arctan2({v}, 1 + {u} ** 2)
jnp.cbrt({v} ** 2 + 1)
jnp.hypot({v}, 1 + {u} ** 2)
jnp.logaddexp({v}, {u})
{v} + {u}
{v} - 0.5 * {u}
{v} * {u}
{v} * jnp.tanh({u})
jax.nn.silu({v}) * {u}
jnp.maximum({v}, {u})
jnp.minimum({v}, 2 * {u})
jnp.clip({v}, -2.5, 2.5)
jnp.abs({v})
jnp.where(mask({s}, {n}, {d}), {v}, {u})
jnp.where(mask({s}, {n}, {d}), {v}, -1e9) * mask({s}, {n}, {d})
{v} * mask({s}, {n}, {d})
{v} * np.float32(1.7)
{v} * np.float64(0.3)
{v} * 3 - 1
{v} * 50
{v} * 300.0
{v} / 40
{v} / 0.02
2 - {v}
{v} / 3
-{v}
{v} + table({s}, {n}, {d})
{v} * table({s}, {d})
{v} + table({s}, {n}, 1)
{v} + jnp.arange({d})
{v} + jnp.arange({n})[:, None] / {n}
{v} * {pd}
{v} + {pd}
normalized_ct({v})
{v} * (1 + {pd}) + {pd}
{v} * {p1}
{v} * jnp.exp({p1})
{v} + {pnd}
{v} / (1 + {pd} ** 2)
{v} - jnp.mean({v}, -1, keepdims=True)
{v} - {v}.mean(0)
{v} / (jnp.linalg.norm({v}, axis=-1, keepdims=True) + 1e-6)
{v} * lax.rsqrt(jnp.mean({v} ** 2, -1, keepdims=True) + 1e-6)
{v} * lax.rsqrt(jnp.mean({v} ** 2, -1, keepdims=True) + 1e-6) * (1 + {pd})
{v} / jnp.sqrt(jnp.mean(jnp.square({v}), -1, keepdims=True) + 1e-8)
({v} - {v}.mean(-1, keepdims=True)) / jnp.sqrt({v}.var(-1, keepdims=True) + 1e-5)
({v} - {v}.mean(0)) / ({v}.std(0) + 1e-5)
{v} * lax.rsqrt(jnp.einsum("nd,nd->n", {v}, {v})[:, None] + 1e-6)
jax.nn.standardize({v}, epsilon=1e-5)
jax.nn.softmax({v})
jax.nn.softmax({v} * 0.1, axis=0) * {n}
jax.nn.log_softmax({v})
jnp.exp({v} - jax.nn.logsumexp({v}, -1, keepdims=True))
{v} - jnp.log(jnp.sum(jnp.exp({v} - {v}.max()), 0)) - {v}.max()
{v} / (1 + jnp.max(jnp.abs({v})))
{v} / (1 + jnp.sum(jnp.abs({v})))
{v} * jnp.minimum(1, 5 / (jnp.sqrt(jnp.sum({v} ** 2)) + 1e-6))
{v} * jnp.sum({v} * {u}, -1, keepdims=True) / {d}
{v} + jnp.vdot({v}, {u}) / {nd}
jnp.cumsum({v}, 0)
jnp.cumsum({v}, 1) / {d}
lax.cumlogsumexp({v}, 0)
jnp.cumprod(jax.nn.sigmoid({v}), 0)
lax.associative_scan(jnp.add, {v})
lax.cummax({v}, 0)
recurrence({v}, {pdd})
jax.ops.segment_sum({v}, ids({s}, {n}, 2), {n})
jax.ops.segment_max({v}, ids({s}, {n}, 2), {n}, indices_are_sorted=False) * 0 + {v}
{v}.at[ids({s}, 3, {n})].add({v}[:1])
{v}.at[0].set({pd})
{v}.at[:, 0].multiply(0.5)
{v}[ids({s}, {n}, {n})]
jnp.take({v}, ids({s}, {d}, {d}), axis=1)
jnp.take_along_axis({v}, ids({s}, {n}, {d})[:, None], 1) * jnp.tanh({v})
{pnd}[ids({s}, {n}, {n})] * {v}
{tiny}[ids({s}, {n}, {n})] * {v} + {u}
{tiny}[ids({s}, {n}, {n})] * 1e6 * {v}
{tiny} * 1e6 * {v}
lax.scan(lambda c, s: (c + 0.003 * jnp.tanh(c @ {pdd} + s), None), {v}, {many})[0]
lax.scan(lambda c, s: (c + 0.003 * s * {v}, None), {u}, {many})[0]
lax.scan(lambda c, s: (jnp.tanh(c @ s), jnp.sum(c)), {v}, {layers})[0]
{v}[::-1]
jnp.roll({v}, 1, 0)
jnp.flip({v}, 1)
jnp.pad({v}, ((1, 0), (0, 0)))[:-1]
lax.dynamic_update_slice({v}, {u}[:1] * 2, (jnp.int32({n} // 2), 0))
lax.dynamic_slice(jnp.concatenate([{v}, {u}]), (jnp.int32(1), 0), ({n}, {d}))
jnp.concatenate([{v}[:1], {u}[1:]])
jnp.concatenate([{u}, {v}], -1)[:, :{d}]
jnp.stack([{v}, {u}]).mean(0)
jnp.stack([{v}, {u}]).max(0)
sum(jnp.split(jnp.tile({v}, (1, 2)), 2, -1)) / 2
jnp.repeat({v}, 100, axis=0).reshape({n}, 100, {d}).mean(1)
jnp.broadcast_to({v}[:, None], ({n}, 70, {d})).sum(1) / 70
jnp.sort({v}, -1)
jnp.sort({v}, 0)[::-1]
lax.top_k({v}, {d})[0]
lax.reduce_window({v}, -jnp.inf, lax.max, (2, 1), (1, 1), "SAME")
lax.reduce_window({v}, 0.0, lax.add, (2, 2), (1, 1), "SAME") / 4
lax.stop_gradient({v}) + {u}
lax.stop_gradient(jnp.exp(jnp.tanh({v}))) * {u}
{v} + lax.stop_gradient(jnp.round({v} * 4) / 4 - {v})
jax.lax.optimization_barrier({v})
jax.nn.one_hot(ids({s}, {n}, {d}), {d}) * {v}
jax.nn.one_hot(ids({s}, {n}, {d}), {d}) + {v}
{v} * jnp.asarray(ids({s}, {d}, 4))
{v} * (jnp.int32(2) ** 3) / 8
{v} * {v}.shape[0]
{v}.astype(jnp.bfloat16).astype(jnp.float32) * 0 + {v}
jnp.real(jnp.fft.ifft(jnp.fft.fft({v}) * 1.5))
jnp.real(lax.complex({v}, {u}) * lax.complex({u}, {v})) / 4
jnp.abs(lax.complex({v}, {u}) + 0.1)
{v} * jnp.linalg.det(jnp.eye({d}) * 2 + jnp.tanh({pdd}) / {d}) / 2 ** {d}
jnp.linalg.solve(jnp.eye({d}) * 3 + jnp.tanh({pdd}), {v}.T).T
{v} @ {pdd}
{v} @ {pdd} + {pd}
{v} + jax.nn.relu({v} @ {pdd}) @ {pdd}
{v} + jax.nn.gelu({v} @ {pdd}) @ {pdd} * {pd}
jnp.dot({v}, {pdd}, preferred_element_type=jnp.float32)
jnp.dot({v}, {pdd}, precision="highest")
jnp.matmul({v}, {pdd}, precision=lax.Precision.HIGHEST) @ {pdd}
({v}.astype(jnp.bfloat16) @ {pdd}.astype(jnp.bfloat16)).astype(jnp.float32) * 1e-3 + {v}
({v}.astype(jnp.float16) @ {pdd}.astype(jnp.float16)).astype(jnp.float32)
jnp.einsum("nd,de,ef->nf", {v}, {pdd}, {pdd})
jnp.einsum("nd,nde->ne", {v}, jnp.tanh({u})[:, :, None] * {pdd})
jax.vmap(lambda row, w: row @ w, (0, None))({v}, {pdd})
{pnnd} @ {v}
(jnp.tanh({v}) @ {v}.T) @ jnp.tanh({u}) / {nd}
attention({v}, {v}, {v})
attention({v} @ {pdd}, {u} @ {pdd}, {v} @ {pdd})
jnp.tensordot({v}, {pdd}, 1)
lax.dot({v}, {pdd})
jnp.inner({v}, {pdd})
(jnp.float32([[2.0]]) * {v}) @ table({s}, {d}, {d}) / {d}
conv({v}, {c3dd}, window_strides=(1,), padding="SAME")
conv({v}, {c3dd}, window_strides=(1,), padding="SAME", rhs_dilation=(2,))
conv({v}, {c31d}, window_strides=(1,), padding="SAME", feature_group_count={d})
lax.ragged_dot({v}, {e2dd}, jnp.array([1, {n} - 1], jnp.int32))
by_rows(lambda p, row: jnp.tanh(row) * (row @ jnp.sin(row).T) / {d})(p, {v})
"""
# Those of another function f of such arrays, and of g, another:
HOLDING = """
{f}(p, {v})
jitted({f})(p, {v})
twice_jitted({f})(p, {v})
by_scan({f})(p, {v})
by_scan({f}, unroll=3)(p, {v})
by_fori({f})(p, {v})
by_while({f})(p, {v})
by_cond({f}, {g})(p, {v})
by_switch({f}, {g})(p, {v})
by_traced_switch({f}, {g})(p, {v})
remat({f}, {policy})(p, {v})
remat(by_scan(remat({f}, {policy})), {policy})(p, {v})
by_scan(by_cond({f}, {g}))(p, {v})
jitted(scaled_vjp({g}))(p, {v})
scaled_vjp({f})(p, {v})
scaled_vjp(by_scan({f}))(p, {v})
kept_vjp({f})(p, {v})
by_scan(kept_vjp({f}))(p, {v})
remat(kept_vjp({f}), {policy})(p, {v})
scaled_jvp({f})(p, {v})
by_scan(scaled_jvp({f}))(p, {v})
remat(scaled_jvp({f}), {policy})(p, {v})
jax.jvp(lambda v: {f}(p, v), ({v},), (jnp.ones_like({v}),))[1]
descended({f})(p, {v})
sent({f}, {how})(p, {v})
sent({f}, {how})(p, {v} @ {pdd})
sent(lambda p, v: v @ {pdd}, {how})(p, {v})
"""
# Of functions of one row:
OF_ROWS = """
by_rows({f})(p, {v})
by_map({f})(p, {v})
by_scan_of_rows({f})(p, {v})
by_rows(by_cond({f}, {g}))(p, {v})
by_rows(scaled_vjp({f}))(p, {v})
"""
# Those that change the number of columns, to {e}:
CHANGING = """
{v} @ {pde}
{v} @ {pde} + {pe}
jnp.einsum("nd,ed->ne", {v}, {ped})
conv({v}, {c3de}, window_strides=(1,), padding="SAME")
jnp.concatenate([{v}, {v} * 2], -1) @ {p2de}
jnp.einsum("nd,dhk->nhk", {v}, {d2e}).max(1)
"""
PRODUCTS = re.compile(r"@|dot|einsum|conv|attention|matmul|inner")


class Writer:
    """Writes a program."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.functions, self.params, self.count = [], {}, itertools.count(1)

    def param(self, shape, size):
        name = f"w{len(self.params)}"
        self.params[name] = (shape, float(size))
        return f'p["{name}"]'

    def choice(self, lines):
        return str(self.rng.choice(lines.strip().splitlines()))

    def line(self, scope, shape, depth):
        """A new line, of the variables in scope with their shapes."""
        name, (n, d) = self.pick(scope, shape), shape
        kind, e = self.rng.random(), int(self.rng.integers(2, 9))
        if depth and kind < 0.22:
            text, inner = self.choice(HOLDING), shape
        elif depth and kind < 0.29:
            text, inner = self.choice(OF_ROWS), (1, d)
        elif depth and kind < 0.4:
            text = self.choice(CHANGING)
            shape = (n, e)
        elif kind < 0.6:
            text = self.choice("\n".join(filter(PRODUCTS.search, KEEPING.splitlines())))
        else:
            text = self.choice(KEEPING)
        fan = d**-0.5
        makers = {
            "v": lambda: name,
            "u": lambda: self.pick(scope, (n, d)),
            "s": lambda: str(self.rng.integers(1000)),
            "n": lambda: str(n),
            "d": lambda: str(d),
            "nd": lambda: str(n * d),
            "policy": lambda: str(self.rng.integers(5)),
            "how": lambda: str(self.rng.integers(len(SENDS))),
            "f": lambda: self.function(inner, depth - 1),
            "g": lambda: self.function(inner, depth - 1),
            "pd": lambda: self.param((d,), 0.5),
            "p1": lambda: self.param((), 1.0),
            "pnd": lambda: self.param((n, d), 1.0),
            "tiny": lambda: self.param((n, d), 1e-6),
            "many": lambda: self.param((300, d), 1.0),
            "layers": lambda: self.param((3, d, d), fan),
            "pnnd": lambda: self.param((n, n), fan),
            "pdd": lambda: self.param((d, d), fan),
            "pde": lambda: self.param((d, e), fan),
            "ped": lambda: self.param((e, d), fan),
            "p2de": lambda: self.param((2 * d, e), fan / 2),
            "d2e": lambda: self.param((d, 2, e), fan),
            "pe": lambda: self.param((e,), 0.5),
            "c3dd": lambda: self.param((3, d, d), fan / 2),
            "c3de": lambda: self.param((3, d, e), fan / 2),
            "c31d": lambda: self.param((3, 1, d), 0.5),
            "e2dd": lambda: self.param((2, d, d), fan),
        }
        text = re.sub(r"\{(\w+)\}", lambda m: makers[m[1]](), text)
        return Line(f"v{len(scope)}", text, shape)

    def pick(self, scope, shape):
        """A variable of a shape, a late one rather than an early one."""
        names = [name for name, s in scope.items() if s == shape]
        return names[max(self.rng.integers(len(names), size=2))]

    def function(self, shape, depth, length=None):
        """Writes a function whose result has the shape of its argument; with a length, any."""
        scope, lines = {"v0": shape}, []
        now = shape
        keeps = length is None
        for _ in range(length or self.rng.integers(1, 4)):
            line = self.line(scope, now, depth)
            if keeps and line.shape != now:
                continue
            scope[line.name], now = line.shape, line.shape
            lines.append(line)
        name = f"f{next(self.count)}"
        if keeps and not lines:
            lines = [Line("v1", "jnp.tanh(v0)", shape)]
        others = [] if keeps else [str(x) for x in self.rng.choice([*scope], 3)]
        self.functions.append(Function(name, shape, tuple(lines), tuple(others)))
        return name


def program(seed):
    """The program of a seed."""
    writer = Writer(seed)
    shape = (int(writer.rng.integers(2, 7)), int(writer.rng.integers(2, 9)))
    size = float(writer.rng.choice([1e-2, 1.0, 1.0, 1.0, 30.0, 300.0]))
    writer.function(shape, 2, length=int(writer.rng.integers(3, 9)))
    made = Program(seed, tuple(writer.functions), writer.params, shape, size)
    return pruned(made)


# --- what is asked of a program ---


PRODUCTS_OF_JAX = {
    "dot_general",
    "conv_general_dilated",
    "ragged_dot",
    "ragged_dot_general",
}
# What autocast may compute in 16 bits if its operands are.
FOLLOWING = {
    "abs", "add", "add_any", "clamp", "div", "erf", "logistic", "max", "min", "mul", "neg",
    "select_n", "sub", "tanh",
}  # fmt: skip


def moving(seed, names, note=None):
    """A rule for `evaluate`: results of these primitives, and products' operands, are moved.

    The largest of them are given to `note`, one for each equation, as the program runs.
    """
    count = itertools.count()

    def hashed(v, n):
        wild = jnp.sin(v * 12989.8 + seed * 78.233 + n * 37.719) * 43758.5453
        return 2 * (wild - jnp.floor(wild)) - 1

    def moved(v, n, rounding=ROUNDING, smallest=SMALLEST):
        if v.dtype != jnp.float32:
            return v
        moves = v * rounding * hashed(v, n) + smallest * hashed(v, n + 0.5)
        # or inf would be NaN
        return jnp.where(jnp.isfinite(v), v + jnp.sign(seed) * moves, v)

    def as_written(outs, eqn, number):
        """What the program itself rounds to 16 bits may be rounded to the next number there."""
        written = {jnp.bfloat16: (2.0**-8, 0), jnp.float16: (ROUNDING, SMALLEST)}
        how = [written.get(v.aval.dtype.type, (0, 0)) for v in eqn.outvars]
        return [moved(x, number + 0.3, *by) for x, by in zip(outs, how, strict=True)]

    def rule(eqn, ins):
        name, number = eqn.primitive.name, next(count)
        if name not in names:
            outs = widely(eqn, ins)  # which float32 rounds as well
            if any(map(is_inexact, eqn.invars)):
                outs = [moved(x, number + 0.7, 2.0**-22, 0) for x in outs]
            return as_written(outs, eqn, number)
        is_product = name in PRODUCTS_OF_JAX and "HIGHEST" not in str(
            eqn.params["precision"]
        )
        if is_product:
            ins = [moved(x, number + 0.1 * i) for i, x in enumerate(ins)]
        outs = [moved(x, number + 0.7) for x in widely(eqn, ins)]
        outs = as_written(outs, eqn, number)
        if name in PRODUCTS_OF_JAX and not is_product:
            return outs
        large = [jnp.max(jnp.abs(x), initial=0) for x in [*ins * is_product, *outs]
                 if x.dtype == jnp.float32]  # fmt: skip
        if note and large:
            jax.debug.callback(note, functools.reduce(jnp.maximum, large))
        return outs

    return rule


class Sensitivity:
    """How far a program moves if what is rounded in it does."""

    def __init__(self, fun, names, p, x):
        step = scaled_value_and_grad(fun, (0, 1))
        self.jaxprs = (
            jax.make_jaxpr(fun)(p, x),
            jax.make_jaxpr(step)(jnp.float32(1), p, x),
        )
        self.tree = jax.tree.structure(jax.eval_shape(step, jnp.float32(1), p, x))
        self.names, self.args = names, jax.tree.leaves((p, x))

    def is_in_range(self):
        largest = []

        @jax.jit
        def run(seed, *args):
            return evaluate(self.jaxprs[0], args, moving(seed, self.names, note))

        def note(x):
            largest.append(float(x))

        run(jnp.float32(0), *self.args)
        jax.effects_barrier()
        return not any(x > LARGEST or math.isnan(x) for x in largest)

    def errors(self, scale, samples=12):
        """The largest error of each array."""

        @jax.jit
        def run(seed, *args):
            outs = evaluate(self.jaxprs[1], args, moving(seed, self.names))
            (_, value), grads = jax.tree.unflatten(self.tree, outs)
            return value, grads

        scale, found = jnp.float32(scale), collections.Counter()
        still = run(jnp.float32(0), scale, *self.args)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(still)), (
            "nothing is moved here"
        )
        for n in range(1, samples + 1):
            errors = compared(run(jnp.float32(n), scale, *self.args), still)
            found = {name: max(found[name], error) for name, error in errors.items()}
            found = collections.Counter(found)
        return found


class Finding(NamedTuple):
    # "", "ill-conditioned", "out of range", "follows", "wrong", "dtype", an exception's
    kind: str
    text: str


def tried(program, autocast=None):
    """What autocast makes of a program."""
    autocast = autocast or ols.autocast
    p, x = program.arguments()
    fun = program.function()
    exact_step = jax.jit(scaled_value_and_grad(fun, (0, 1)))
    try:
        usual = sums_in_16_bits(exact_step, jnp.float32(1), p, x, many=MANY)
        if not is_finite(exact_step(jnp.float32(1), p, x)):
            return Finding("out of range", "")
    except Exception as error:  # the program is none
        return Finding("no program", repr(error))
    try:
        step = jax.jit(scaled_value_and_grad(autocast(fun), (0, 1)))  # traced once
        report = ols.dtype_report(step, jnp.float32(1), p, x)
        narrow = sums_in_16_bits(step, jnp.float32(1), p, x, many=MANY)
        actual, scale = with_its_scale(step, p, x)
    except Exception as error:
        return Finding(type(error).__name__, str(error)[:1500])
    # At the same scale, as a rule of the program's own need not be linear.
    exact = at_scale(exact_step, scale, p, x)
    if scale == 2.0 ** EXPONENTS[-1] or not is_finite(exact):
        return Finding("out of range", "")
    dtypes = wrong_dtypes(report, narrow, usual)
    if dtypes and not (has_a_vjp_in_a_jvp(program) or has_outer_product(fun, p, x)):
        return Finding("dtype", dtypes)
    kinds = lambda tree: [(y.shape, y.dtype) for y in jax.tree.leaves(tree)]
    if kinds(actual) != kinds(exact):
        return Finding("kind", f"{kinds(actual)}, not {kinds(exact)}")
    errors = compared(actual, exact)
    if max(errors.values()) <= FREE:
        return Finding("", "")
    finding = Finding("", "")
    for kind, names in [
        ("follows", PRODUCTS_OF_JAX),
        ("wrong", PRODUCTS_OF_JAX | FOLLOWING),
    ]:
        sensitivity = Sensitivity(fun, names, p, x)
        if not sensitivity.is_in_range():
            return finding if finding.kind else Finding("out of range", "")
        allowed = sensitivity.errors(scale)
        if not max(allowed.values()) <= ILL:
            return finding if finding.kind else Finding("ill-conditioned", "")
        told = [f"{name} is off by {e:.2g}, allowed {4 * allowed[name] + FREE:.2g}"
                for name, e in errors.items() if e > 4 * allowed[name] + FREE]  # fmt: skip
        if not told:
            return finding
        finding = Finding(kind, "\n".join(told))
    return finding


def with_its_scale(step, p, x):
    for exponent in EXPONENTS:
        scale = 2.0**exponent
        value, grads = at_scale(step, scale, p, x)
        if is_finite(grads):
            break
    return (value, grads), scale


def at_scale(step, scale, p, x):
    """The value and the unscaled gradients."""
    (_, value), grads = step(jnp.float32(scale), p, x)
    return value, jax.tree.map(lambda g: g / scale, grads)


def is_finite(tree):
    return all(np.isfinite(x).all() for x in jax.tree.leaves(tree))


def compared(actual, exact):
    """The error of each array, relative to its largest number."""
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(exact), strict=True
    )
    return {jax.tree_util.keystr(path): relative_error(a, b) for (path, a), b in pairs}


def has_a_vjp_in_a_jvp(program):
    """Whether a custom_vjp lies in a custom_jvp, where its backward pass stays in float32.

    JAX makes that pass within the rule of the custom_jvp, as a function and not as a program.
    """
    texts = {f.name: " ".join(line.text for line in f.lines) for f in program.functions}

    def reached(name):
        return texts[name] + "".join(map(reached, re.findall(r"\bf\d+\b", texts[name])))

    inside = re.findall(r"scaled_jvp\((f\d+)\)", " ".join(texts.values()))
    return any("_vjp" in reached(name) for name in inside)


def has_outer_product(fun, p, x):
    """Whether a product sums nothing: it stays in float32, and so do its derivative's."""
    return any(
        eqn.primitive.name == "dot_general" and not is_product(eqn)
        for eqn in equations(jax.make_jaxpr(fun)(p, x).jaxpr)
    )


def wrong_dtypes(report, narrow, usual):
    """What a report says of products in the wrong dtype, and the sums in 16 bits."""
    wide = [p for p in report.products if p.dtype == jnp.float32 and not p.by_choice]
    return f"{report}\n{narrow}" if wide or (narrow and not usual) else ""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--findings", type=int, default=20, help="stop after so many")
    options = parser.parse_args()
    if options.seed is not None:
        one = program(options.seed)
        finding = tried(one)
        if options.shrink and finding.kind:
            one = shrunk(one, lambda p: tried(p).kind == finding.kind)
            finding = tried(one)
        print(one, finding.kind or "right", finding.text, sep="\n")
        return
    counts, kinds, begin = collections.Counter(), collections.Counter(), time.time()
    for seed in itertools.count(options.start):
        if (
            time.time() - begin > 60 * options.minutes
            or sum(kinds.values()) >= options.findings
        ):
            break
        one = program(seed)
        finding = tried(one)
        counts[finding.kind or "right"] += 1
        if finding.kind == "no program":
            print("# no program", seed, finding.text[:300])
        if finding.kind not in ("", "ill-conditioned", "out of range", "no program"):
            kinds[finding.kind] += 1
            small = shrunk(one, lambda p: tried(p).kind == finding.kind, tries=60)  # noqa: B023
            print(f"--- {finding.kind}\n{small}\n{tried(small).text}\n", flush=True)
        if seed % 20 == 0:
            jax.clear_caches()
            print(f"# {seed}: {dict(counts)}", flush=True)
    print(f"# {dict(counts)} in {time.time() - begin:.0f} s")
    sys.exit(bool(kinds))


if __name__ == "__main__":
    from compiling import compile_quickly

    compile_quickly()
    jax.config.update("jax_num_cpu_devices", 2)
    warnings.simplefilter("ignore")
    main()
