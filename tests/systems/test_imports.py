"""What the package needs of others at import, and that it needs no more."""

import inspect
import pickle
import pydoc
import re
import subprocess
import sys
import textwrap

import pytest

import optax_lossscale as ols

# Before the import, each takes away something that is no promise of Optax's.
WITHOUT = {
    "a chain that is refactored": """
        chain = optax.chain
        def refactored(*args):
            tx = chain(*args)
            return optax.GradientTransformationExtraArgs(
                functools.partial(lambda init, params: init(params), tx.init),
                functools.partial(lambda update, *args, **kw: update(*args, **kw), tx.update),
            )
        optax.chain = refactored
        optax.named_chain = lambda *named: refactored(*(tx for _, tx in named))
    """,
    "the states of optimizers": """
        for module in (optax, optax.contrib):
            for name in dir(module):
                if name.endswith("State") and name not in ("OptState", "EmptyState"):
                    delattr(module, name)
    """,
    "optax.contrib": """
        del optax.contrib
        sys.modules["optax.contrib"] = None
    """,
}


@pytest.mark.slow
@pytest.mark.parametrize("without", WITHOUT.values(), ids=WITHOUT)
def test_the_package_is_imported_and_takes_a_step_without(without):
    script = """
        import functools, sys
        import jax.numpy as jnp
        import optax
        WITHOUT
        import optax_lossscale as ols
        inner = optax.chain(optax.clip(1.0), ols.with_master_weights(optax.chain(optax.sgd(0.5))))
        tx = ols.with_loss_scale(inner, skip=ols.skips.spikes())
        params = {"w": jnp.ones(3, jnp.bfloat16)}
        state = tx.init(params)
        loss_fn = lambda p: p["w"].sum(dtype=jnp.float32)
        loss, grads = ols.value_and_scaled_grad(loss_fn, state)(params)
        params, state = tx.apply_gradients(grads, state, params, value=loss)
        assert (params["w"] == 0.5).all() and ols.metrics(state)["should_apply"]
    """
    script = textwrap.dedent(script).replace("WITHOUT\n", textwrap.dedent(without))
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.slow
def test_what_reads_programs_or_draws_is_imported_when_it_is_used():
    script = """
        import sys
        import optax_lossscale as ols
        late = ("_programs", "_autocast", "testing", "plot")
        ours = [name for name in sys.modules if name.startswith("optax_lossscale.")]
        imported = {name.split(".")[1] for name in ours}
        assert not imported.intersection(late), imported
        assert set(ols.__all__) <= set(dir(ols)) and callable(ols.autocast)
        assert "optax_lossscale._programs.operations" in sys.modules
        assert callable(ols.dtype_report) and callable(ols.testing.assert_computes_in)
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=120
    )


# A process that has imported JAX and this package forks for each use: so each is the
# first there.
FIRST_USE = """
    import os
    import sys
    import jax
    import jax.numpy as jnp
    import optax
    import optax_lossscale as ols

    inner = optax.sgd(0.1)

    def loss_fn(w, x):
        return jnp.mean((x @ w) ** 2)

    def traces_and_compilations(use):
        traces, compiled = [], []
        @jax.jit
        def step(w, x):
            traces.append(0)
            eval(use, globals(), {"w": w, "x": x})
            return w * 2
        w, x = jax.numpy.ones((4, 4)), jax.numpy.ones((2, 4))
        step(w, x)
        def listen(event, duration, **_):
            if "compile" in event:
                compiled.append(event)
        jax.monitoring.register_event_duration_secs_listener(listen)
        step(w, x)
        return len(traces), compiled

    for use in sys.argv[1:]:
        child = os.fork()
        if not child:
            result = traces_and_compilations(use)
            print(use, *result) if result != (1, []) else None
            sys.stdout.flush()
            os._exit(result != (1, []))
        assert os.waitpid(child, 0)[1] == 0, use
"""

USES = [
    "ols.autocast(loss_fn)(w, x)",
    "ols.scale_gradient(loss_fn(w, x), 8)",
    "ols.with_loss_scale(inner).minimize(loss_fn, ols.with_loss_scale(inner).init(w), w, x)",
]


def public_names():
    """Every public name of the package and of its public modules, as one writes it."""
    names = [f"ols.{name}" for name in ols.__all__]
    for module in [ols.plot, ols.skips, ols.testing]:
        path = module.__name__.replace("optax_lossscale", "ols")
        names += [f"{path}.{name}" for name in dir(module) if not name.startswith("_")]
    return names


def assert_each_is_traced_once(uses):
    script = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(FIRST_USE), *uses]
    subprocess.run(script, check=True, timeout=600)


@pytest.mark.slow
def test_what_is_first_used_inside_of_jit_is_traced_and_compiled_once():
    assert_each_is_traced_once(USES)


@pytest.mark.slow
def test_so_is_every_public_name():
    assert_each_is_traced_once(public_names())


def public(module):
    """The classes and functions that a public module has for its users, by their full names."""
    own = [name for name, x in vars(module).items() if inspect.isfunction(x)]
    for name in getattr(module, "__all__", own):
        value = getattr(module, name)
        if isinstance(value, str):
            continue  # a color of `plot`
        if inspect.ismodule(value):
            yield from public(value)
        elif hasattr(module, "__all__") or value.__module__ == module.__name__:
            yield f"{module.__name__}.{name}", module, value


PUBLIC = {
    name: (module, value) for name, module, value in [*public(ols), *public(ols.plot)]
}


@pytest.mark.parametrize("name", PUBLIC)
def test_what_is_public_shows_its_source(name):
    _, value = PUBLIC[name]
    assert pickle.loads(pickle.dumps(value)) is value
    assert value.__name__ in inspect.getsource(value)


def test_dir_has_every_name_and_what_draws_too():
    assert {*ols.__all__, "plot"} <= set(dir(ols))


def test_help_begins_with_a_line_for_each_name():
    text = pydoc.plain(pydoc.render_doc(ols))
    overview, _ = text.split("PACKAGE CONTENTS")
    assert len(overview.splitlines()) < 60
    assert max(map(len, overview.splitlines())) <= 105
    assert [
        name for name in ols.__all__ if not re.search(rf"\b{name}\b", overview)
    ] == []
    assert "optax_lossscale._" not in overview
