"""Random programs, and whether autocast computes them as float32 does.

A program is made of a seed, as Python source, so that a finding can be read and run again:

    python tests/autocast/programs.py --minutes 60    # look for findings, each one shrunk
    python tests/autocast/programs.py --seed 1234     # try one program, shrink and print it

How far autocast may be from float32 is measured, program by program: the program and its gradient
run in float32, with what products take and give, and what sums take, moved at random by as much as
float16 rounds it. Programs that this moves far are ill-conditioned, and are left out, as are those
with products above the range of float16. What lies between may be as large as float32 allows.
"""

import argparse
import collections
import functools
import itertools
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
from optax_lossscale._programs.enter import enter, is_entered  # noqa: E402
from optax_lossscale._programs.operations import PRODUCTS, SUMS  # noqa: E402
from optax_lossscale._programs.products import is_product  # noqa: E402
from optax_lossscale._programs.versions import (  # noqa: E402
    bind,
    constants,
    name_of,
    open_jaxpr,
)
from optax_lossscale._programs.walk import result_programs  # noqa: E402

ROUNDING = 2.0**-11  # of float16, relative
SMALLEST = 2.0**-25  # half its smallest number
LARGEST = 3e4
FREE = 2.0**-9  # an error below which nothing is asked
ILL = 0.03  # moved by more than this, a program says nothing


# --- programs ---


class Line(NamedTuple):
    """`name = text`, where `text` mentions variables; its result has a shape."""

    name: str
    text: str
    shape: tuple[int, ...]


class Function(NamedTuple):
    """`name(p, v0)`, of the parameters and an array of a shape."""

    name: str
    shape: tuple[int, ...]
    lines: tuple[Line, ...]
    results: tuple[str, ...]

    def __str__(self):
        lines = [f"    {line.name} = {line.text}" for line in self.lines]
        returned = f"    return {', '.join(self.results)}"
        return "\n".join([f"def {self.name}(p, v0):", *lines, returned])


class Program(NamedTuple):
    seed: int
    functions: tuple[Function, ...]  # the last is the program
    # shapes, and how large the numbers are
    params: dict[str, tuple[tuple[int, ...], float]]
    shape: tuple[int, ...]
    size: float

    def __str__(self):
        given = f"# seed {self.seed}; x: {self.shape} * {self.size}; {self.params}"
        return "\n\n".join([given, *map(str, self.functions)])

    def function(self):
        """The loss of the parameters and an input."""
        names = dict(PIECES)
        exec(compile(str(self), f"<program {self.seed}>", "exec"), names)
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
        return {name: number(*how) for name, how in self.params.items()}, x


def shrunk(program, fails, tries=200):
    """A smaller program that fails as well."""
    for smaller in itertools.islice(smaller_ones(program), tries):
        if fails(smaller):
            return shrunk(smaller, fails, tries - 1)
    return program


def smaller_ones(program):
    """Programs in which a line gives what an earlier one does."""
    for n, f in enumerate(program.functions):
        earlier = {f.shape: "v0"}
        for i, line in enumerate(f.lines):
            if line.shape in earlier and not line.text.isidentifier():
                same = line._replace(text=earlier[line.shape])
                functions = list(program.functions)
                functions[n] = f._replace(lines=(*f.lines[:i], same, *f.lines[i + 1 :]))
                yield program._replace(functions=called(functions))
            earlier[line.shape] = line.name


def called(functions):
    """Those that the last one calls, or others that it calls."""
    text, kept = f"{functions[-1].name}(", []
    for f in reversed(functions):
        if re.search(rf"\b{f.name}\b", text):
            kept.append(f)
            text += str(f)
    return tuple(reversed(kept))


# --- helpers that a program may call ---


def scaled_jvp(f):
    """With a custom derivative, which is not the function's own."""
    g = jax.custom_jvp(f)

    @g.defjvp
    def rule(primals, tangents):
        y, t = jax.jvp(f, primals, tangents)
        return y, t * 1.5

    return g


def scaled_vjp(f):
    g = jax.custom_vjp(f)
    backward = lambda saved, ct: jax.vjp(f, *saved)[1](ct * 1.5)
    g.defvjp(lambda p, v: (f(p, v), (p, v)), backward)
    return g


def kept_vjp(f):
    """A custom derivative that keeps the function of the forward pass."""
    g = jax.custom_vjp(lambda n, p, v: f(p, v) * n, nondiff_argnums=(0,))
    forward = lambda n, p, v: jax.vjp(lambda p, v: f(p, v) * n, p, v)
    g.defvjp(forward, lambda n, vjp, ct: vjp(ct * n))
    return functools.partial(g, 2)


normalized_ct = jax.custom_vjp(lambda v: v)
normalized_ct.defvjp(
    lambda v: (v, None), lambda _, ct: (ct / (1e-3 + jnp.linalg.norm(ct)),)
)


def by_scan(f):
    step = lambda p: lambda c, i: (0.5 * c + f(p, c), jnp.sum(c))
    return lambda p, v: lax.scan(step(p), v, jnp.arange(3))[0]


def by_scan_of_rows(f):
    """Of rows, with the result of each as an output, in reverse."""
    step = lambda p: lambda c, row: (0.5 * c + row, f(p, (row + c)[None])[0])
    return lambda p, v: lax.scan(step(p), v[0], v, reverse=True)[1]


def by_fori(f):
    step = lambda p: lambda i, c: 0.5 * c + f(p, c) * (i + 1) / 3
    return lambda p, v: lax.fori_loop(0, 3, step(p), v)


def by_while(f):
    """What a loop finds that is not differentiated."""

    def looped(p, v):
        p, start = lax.stop_gradient((p, (0, v)))
        step = lambda state: (state[0] + 1, 0.5 * state[1] + f(p, state[1]))
        return v + lax.while_loop(lambda state: state[0] < 3, step, start)[1]

    return looped


def by_cond(f, g):
    return lambda p, v: lax.cond(jnp.sum(v) > -1e30, f, g, p, v)


def by_switch(f, g):
    return lambda p, v: lax.switch(jnp.argmax(v[:, 0] * 0), [f, g], p, v)


def by_rows(f):
    return lambda p, v: jax.vmap(lambda row: f(p, row[None])[0])(v)


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
    causal = jnp.arange(q.shape[0])[:, None] >= jnp.arange(k.shape[0])
    return jax.nn.softmax(jnp.where(causal, scores, -1e9)) @ v


def conv(v, w, **options):
    """Over the rows of v; w: (width, channels in, channels out)."""
    options = {"window_strides": (1,), "padding": "SAME", **options}
    numbers = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(v[None], w, dimension_numbers=numbers, **options)[0]


def ids(seed, n, below):
    return np.random.default_rng(seed).integers(0, below, n)


PIECES = dict(globals())  # what a program may name

# `{v}` is an array of shape (n, d), `{u}` another one; `{pde}` is a parameter of shape (d, e),
# `{tnd}` a tiny one, `{p}` a number; D stands for 2 d, m for 300. Those that keep the shape:
KEEPING = """
jnp.tanh({v})
jax.nn.gelu({v})
jax.nn.relu({v})
jnp.exp(-({v} ** 2))
jnp.log(1 - jnp.tanh({v}) ** 2 + 1e-6)
1 / (1.001 - jnp.clip({v}, -1, 1))
({v} - 0.9 * {u}) * 30
{v} + {u}
{v} * {u}
jnp.maximum({v}, {u})
jnp.where(jnp.tri({n}, {d}) > 0, {v}, -1e9) * jnp.tri({n}, {d})
{v} * 300.0
{v} * (1 + {pd}) + {pd}
{v} * {p}
normalized_ct({v})
{v} * lax.rsqrt(jnp.mean({v} ** 2, -1, keepdims=True) + 1e-6) * (1 + {pd})
jax.nn.softmax({v})
{v} * jnp.minimum(1, 5 / (jnp.sqrt(jnp.sum({v} ** 2)) + 1e-6))
jnp.cumsum({v}, 0)
recurrence({v}, {pdd})
jax.ops.segment_sum({v}, ids({s}, {n}, 2), {n})
{v}.at[ids({s}, 3, {n})].add({v}[:1])
{v}[ids({s}, {n}, {n})]
{tnd} * 1e6 * {v}
jnp.pad({v}, ((1, 0), (0, 0)))[:-1]
lax.dynamic_update_slice({v}, {u}[:1] * 2, (jnp.int32({n} // 2), 0))
jnp.concatenate([{v}[:1], {u}[1:]])
sum(jnp.split(jnp.tile({v}, (1, 2)), 2, -1)) / 2
jnp.repeat({v}, 100, axis=0).reshape({n}, 100, {d}).mean(1)
jnp.sort({v}, -1)
lax.reduce_window({v}, -jnp.inf, lax.max, (2, 1), (1, 1), "SAME")
{v} + lax.stop_gradient(jnp.round({v} * 4) / 4 - {v})
jax.lax.optimization_barrier({v})
jnp.real(jnp.fft.ifft(jnp.fft.fft({v}) * 1.5))
jnp.linalg.solve(jnp.eye({d}) * 3 + jnp.tanh({pdd}), {v}.T).T
"""
# and multiply:
MULTIPLYING = """
{v} * lax.rsqrt(jnp.einsum("nd,nd->n", {v}, {v})[:, None] + 1e-6)
{v} + jnp.vdot({v}, {u}) / {nd}
lax.scan(lambda c, s: (c + 0.003 * jnp.tanh(c @ {pdd} + s), None), {v}, {pmd})[0]
lax.scan(lambda c, s: (jnp.tanh(c @ s), jnp.sum(c)), {v}, {p3dd})[0]
{v} @ {pdd}
jnp.matmul({v}, {pdd}, precision=lax.Precision.HIGHEST) @ {pdd}
jnp.einsum("nd,de,ef->nf", {v}, {pdd}, {pdd})
jnp.einsum("nd,nde->ne", {v}, jnp.tanh({u})[:, :, None] * {pdd})
{pnn} @ {v}
(jnp.tanh({v}) @ {v}.T) @ jnp.tanh({u}) / {nd}
attention({v} @ {pdd}, {u} @ {pdd}, {v} @ {pdd})
conv({v}, {p3dd}, rhs_dilation=(2,))
conv({v}, {p31d}, feature_group_count={d})
lax.ragged_dot({v}, {p2dd}, jnp.array([1, {n} - 1], jnp.int32))
"""
# Those of another function f of such arrays, and of g, another:
HOLDING = """
{f}(p, {v})
jax.jit({f})(p, {v})
by_scan({f})(p, {v})
by_fori({f})(p, {v})
by_while({f})(p, {v})
by_cond({f}, {g})(p, {v})
by_switch({f}, {g})(p, {v})
jax.checkpoint({f})(p, {v})
jax.checkpoint({f}, policy=jax.checkpoint_policies.dots_saveable)(p, {v})
jax.checkpoint({f}, policy=jax.checkpoint_policies.everything_saveable)(p, {v})
scaled_vjp({f})(p, {v})
kept_vjp({f})(p, {v})
scaled_jvp({f})(p, {v})
jax.jvp(lambda v: {f}(p, v), ({v},), (jnp.ones_like({v}),))[1]
descended({f})(p, {v})
sent({f}, {how})(p, {v})
"""
# Of functions of one row:
OF_ROWS = """
by_rows({f})(p, {v})
by_scan_of_rows({f})(p, {v})
"""
# Those that change the number of columns, to {e}:
CHANGING = """
{v} @ {pde}
jnp.einsum("nd,ed->ne", {v}, {ped})
conv({v}, {p3de})
jnp.concatenate([{v}, {v} * 2], -1) @ {pDe}
jnp.einsum("nd,dhk->nhk", {v}, {pd2e}).max(1)
"""


class Writer:
    """Writes a program."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.functions, self.params = [], {}

    def choice(self, lines):
        return str(self.rng.choice(lines.strip().splitlines()))

    def line(self, scope, shape, depth):
        """A new line, of the variables in scope with their shapes."""
        (n, d), e = shape, int(self.rng.integers(2, 9))
        sizes = {"n": n, "d": d, "e": e, "D": 2 * d, "m": 300}
        kind, inner = self.rng.random(), shape
        if depth and kind < 0.22:
            text = self.choice(HOLDING)
        elif depth and kind < 0.29:
            text, inner = self.choice(OF_ROWS), (1, d)
        elif depth and kind < 0.4:
            text, shape = self.choice(CHANGING), (n, e)
        elif kind < 0.7:
            text = self.choice(MULTIPLYING)
        else:
            text = self.choice(KEEPING)
        makers = {
            "v": lambda: self.pick(scope, (n, d)),
            "u": lambda: self.pick(scope, (n, d)),
            "s": lambda: self.rng.integers(1000),
            "n": lambda: n,
            "d": lambda: d,
            "nd": lambda: n * d,
            "how": lambda: self.rng.integers(len(SENDS)),
            "f": lambda: self.function(inner, depth - 1),
            "g": lambda: self.function(inner, depth - 1),
        }

        def made(match):
            name = match[1]
            if name in makers:
                return str(makers[name]())
            shape = tuple(sizes[x] if x in sizes else int(x) for x in name[1:])
            usual = 0.5 if len(shape) == 1 else float(np.prod(shape[:-1])) ** -0.5
            return self.param(shape, 1e-6 if name[0] == "t" else usual)

        return Line(f"v{len(scope)}", re.sub(r"\{(\w+)\}", made, text), shape)

    def param(self, shape, size):
        name = f"w{len(self.params)}"
        self.params[name] = (shape, size)
        return f'p["{name}"]'

    def pick(self, scope, shape):
        """A variable of a shape, a late one rather than an early one."""
        names = [name for name, s in scope.items() if s == shape]
        return names[max(self.rng.integers(len(names), size=2))]

    def function(self, shape, depth, length=None):
        """Writes a function whose result has the shape of its argument; with a length, any."""
        scope, lines, now = {"v0": shape}, [], shape
        keeps = length is None
        for _ in range(length or self.rng.integers(1, 4)):
            line = self.line(scope, now, depth)
            if not keeps or line.shape == now:
                scope[line.name] = now = line.shape
                lines.append(line)
        lines = lines or [Line("v1", "jnp.tanh(v0)", shape)]
        others = [] if keeps else map(str, self.rng.choice([*scope], 3))
        results = dict.fromkeys([lines[-1].name, *others])
        name = f"f{len(self.functions)}"
        self.functions.append(Function(name, shape, tuple(lines), tuple(results)))
        return name


def program(seed):
    """The program of a seed."""
    writer = Writer(seed)
    shape = (int(writer.rng.integers(2, 7)), int(writer.rng.integers(2, 9)))
    size = float(writer.rng.choice([1e-2, 1.0, 1.0, 1.0, 30.0, 300.0]))
    writer.function(shape, 2, length=int(writer.rng.integers(3, 9)))
    return Program(seed, called(writer.functions), writer.params, shape, size)


# --- what is asked of a program ---


def moved(program, seed, in_range=False):
    """The results of a program whose numbers are moved, as a function of its arguments.

    Where `in_range`, a product above the range of float16 is NaN.
    """
    count = itertools.count()

    def move(x, rounding=ROUNDING, smallest=SMALLEST):
        if x.dtype != jnp.float32:
            return x
        draw = lambda n: jnp.sin(x * 12989.8 + seed * 78.233 + n * 37.719) * 43758.5453
        hashed = lambda n: 2 * (draw(n) - jnp.floor(draw(n))) - 1
        n = next(count)
        by = x * rounding * hashed(n) + smallest * hashed(n + 0.5)
        # or inf would be NaN
        return jnp.where(jnp.isfinite(x), x + jnp.sign(seed) * by, x)

    def of_product(x):
        return jnp.where(jnp.max(jnp.abs(x), initial=0) > LARGEST, jnp.nan, x)

    def compute(eqn, ins):
        precision = str(eqn.params.get("precision"))
        is_low = name_of(eqn) in PRODUCTS and "HIGHEST" not in precision
        if is_low or name_of(eqn) in SUMS:
            ins = [move(x) for x in ins]
        outs = bind(eqn, ins)
        if not is_low:
            return [move(x, 2.0**-22, 0) for x in outs]  # which float32 rounds as well
        return [of_product(move(x)) if in_range else move(x) for x in outs]

    return evaluated(program, compute)


def evaluated(program, compute):
    """How to run a program equation by equation."""
    jaxpr = open_jaxpr(program)

    def call(args):
        variables = [*jaxpr.constvars, *jaxpr.invars]
        values = dict(zip(variables, [*constants(program), *args], strict=True))
        read = lambda v: jnp.asarray(v.val) if isinstance(v, Literal) else values[v]
        for eqn in jaxpr.eqns:
            ins = [read(v) for v in eqn.invars]
            has_rule = name_of(eqn) in ("custom_jvp_call", "custom_vjp_call")
            if has_rule or is_entered(eqn):
                inner = [evaluated(p, compute) for p in result_programs(eqn)]
                outs = inner[0](ins) if has_rule else enter(eqn, ins, inner)
            else:
                outs = compute(eqn, ins)
            values.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    return call


def is_in_range(fun, *args):
    """Whether float16 holds what the products of a function give."""
    program = jax.make_jaxpr(fun)(*args)
    run = jax.jit(moved(program, jnp.float32(0), in_range=True))
    return is_finite(run(jax.tree.leaves(args)))


def sensitivity(step, scale, *args, samples=12):
    """How far the value and each gradient move if what is rounded does."""
    args = jnp.float32(scale), *args
    program, shapes = jax.make_jaxpr(step, return_shape=True)(*args)

    @jax.jit
    def run(seed):
        outs = moved(program, seed)(jax.tree.leaves(args))
        (_, value), grads = jax.tree.unflatten(jax.tree.structure(shapes), outs)
        return value, grads

    still, found = run(jnp.float32(0)), {}
    for n in range(1, samples + 1):
        for name, error in errors(run(jnp.float32(n)), still).items():
            found[name] = max(found.get(name, 0), error)
    return found


class Finding(NamedTuple):
    # "", "ill-conditioned", "out of range", "wrong", "dtype", an exception's
    kind: str
    text: str = ""


def tried(program, autocast=ols.autocast):
    """What autocast makes of a program."""
    args, fun = program.arguments(), program.function()
    exact_step = jax.jit(scaled_value_and_grad(fun, (0, 1)))
    try:
        if not is_finite(exact_step(jnp.float32(1), *args)):
            return Finding("out of range")
    except Exception as error:
        return Finding("no program", repr(error))
    try:
        step = jax.jit(scaled_value_and_grad(autocast(fun), (0, 1)))  # traced once
        wrong = wrong_dtypes(step, jnp.float32(1), *args)
        scale = next((s for s in SCALES if is_finite(at_scale(step, s, *args))), None)
    except Exception as error:
        return Finding(type(error).__name__, str(error)[:1500])
    if scale is None or not is_in_range(fun, *args):
        return Finding("out of range")
    if wrong and not (has_a_vjp_in_a_jvp(program) or has_outer_product(fun, *args)):
        return Finding("dtype", wrong)
    # At the same scale, as a rule of the program's own need not be linear.
    actual, exact = (at_scale(f, scale, *args) for f in (step, exact_step))
    kinds = lambda tree: [(y.shape, y.dtype) for y in jax.tree.leaves(tree)]
    if kinds(actual) != kinds(exact):
        return Finding("kind", f"{kinds(actual)}, not {kinds(exact)}")
    off = errors(actual, exact)
    if max(off.values()) <= FREE:
        return Finding("")
    allowed = sensitivity(exact_step, scale, *args)
    if not max(allowed.values()) <= ILL:
        return Finding("ill-conditioned")
    told = [
        f"{name} is off by {e:.2g}, allowed {4 * allowed[name] + FREE:.2g}"
        for name, e in off.items()
        if e > 4 * allowed[name] + FREE
    ]
    return Finding("wrong" if told else "", "\n".join(told))


SCALES = [2.0**n for n in EXPONENTS[:-1]]


def at_scale(step, scale, *args):
    """The value and the unscaled gradients."""
    (_, value), grads = step(jnp.float32(scale), *args)
    return value, jax.tree.map(lambda g: g / scale, grads)


def is_finite(tree):
    return all(np.isfinite(x).all() for x in jax.tree.leaves(tree))


def errors(actual, exact):
    """The error of each array, relative to its largest number."""
    named = jax.tree_util.tree_leaves_with_path(actual)
    pairs = zip(named, jax.tree.leaves(exact), strict=True)
    return {jax.tree_util.keystr(path): relative_error(a, b) for (path, a), b in pairs}


def has_a_vjp_in_a_jvp(program):
    """Whether a custom_vjp may lie in a custom_jvp: its backward pass stays in float32.

    JAX makes that pass within the rule of the custom_jvp, as a function and not as a program.
    """
    return "scaled_jvp" in str(program) and "_vjp" in str(program)


def has_outer_product(fun, *args):
    """Whether a product sums nothing: it stays in float32, and so do its derivative's."""
    return any(
        eqn.primitive.name == "dot_general" and not is_product(eqn)
        for eqn in equations(jax.make_jaxpr(fun)(*args).jaxpr)
    )


def wrong_dtypes(step, *args):
    """What a report says of products in float32, and the sums in 16 bits."""
    report, narrow = ols.dtype_report(step, *args), sums_in_16_bits(step, *args)
    wide = [p for p in report.products if p.dtype == jnp.float32 and not p.by_choice]
    return f"{report}\n{narrow}" if wide or narrow else ""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()
    seeds = itertools.count(options.start) if options.seed is None else [options.seed]
    kinds, end = collections.Counter(), time.time() + 60 * options.minutes
    for seed in itertools.takewhile(lambda _: time.time() < end, seeds):
        one = program(seed)
        kind = tried(one).kind
        kinds[kind or "right"] += 1
        if kind not in HARMLESS:
            one = shrunk(one, lambda p: tried(p).kind == kind, tries=60)  # noqa: B023
        if kind not in HARMLESS or options.seed is not None:
            print(f"--- {kind or 'right'}\n{one}\n{tried(one).text}\n", flush=True)
        if seed % 20 == 0:
            jax.clear_caches()
            print(f"# {seed}: {dict(kinds)}", flush=True)
    print(f"# {dict(kinds)}")
    sys.exit(not kinds.keys() <= set(HARMLESS))


HARMLESS = ("", "right", "ill-conditioned", "out of range", "no program")

if __name__ == "__main__":
    from compiling import compile_quickly

    compile_quickly()
    jax.config.update("jax_num_cpu_devices", 2)
    warnings.simplefilter("ignore")
    main()
