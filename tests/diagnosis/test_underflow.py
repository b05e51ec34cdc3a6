import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lossscale as ols

# Zero in float16, subnormal, in range, and 2**10 below the largest.
GRADS = {"a": jnp.array([0.0, 1e-9, 1e-6, 1.0]), "b": {"c": jnp.array([2.0**6 * 0.99])}, "d": None}


def test_counts_what_each_scale_loses_and_finds_the_same_best_one():
    report = jax.jit(ols.diagnosis.underflow_report)(
        GRADS, ols.DynamicLossScale(initial_scale=4.0)
    )
    total = report.total
    assert (total.size, total.zeros, total.subnormals) == (5, 2, 1)
    assert report.loss_scale == 4
    # 65504 / 63.36 is a little above 2**10.
    assert report.best_scale == 4 * 2.0**10
    again = ols.diagnosis.underflow_report(jax.tree.map(lambda g: g * 2.0**10, GRADS), 4 * 2.0**10)
    assert again.best_scale == report.best_scale
    assert again.total.infinities == 0
    over = ols.diagnosis.underflow_report(jax.tree.map(lambda g: g * 2.0**11, GRADS), 4 * 2.0**11)
    assert over.total.infinities == 1
    assert over.best_scale == report.best_scale


@pytest.mark.parametrize("power", range(-24, 16))
def test_the_best_scale_is_a_power_of_two(power):
    for size in (1.0, np.nextafter(np.float32(1), np.float32(2)), 65504 / 2**15):
        grads = [jnp.float32(size) * 2.0**power]
        best = float(ols.diagnosis.underflow_report(grads, 1.0).best_scale)
        assert np.frexp(best)[0] == 0.5
        assert float(grads[0]) * best <= 65504 < float(grads[0]) * best * 2


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_gradients_that_are_not_finite_have_no_best_scale(bad):
    assert np.isnan(ols.diagnosis.underflow_report([jnp.array([1.0, bad])], 1.0).best_scale)


@pytest.mark.parametrize("tree", [{}, [None], [jnp.zeros(3)], [jnp.zeros((0, 2))]])
def test_a_tree_without_nonzero_numbers_has_no_best_scale(tree):
    report = ols.diagnosis.underflow_report(tree, 1.0)
    assert np.isnan(report.best_scale)
    assert str(report).splitlines()[-2].split()[0] == "all"


def test_the_best_scale_is_one_that_a_loss_scale_takes():
    best = float(ols.diagnosis.underflow_report(jnp.ones(2), 2.0, jnp.bfloat16).best_scale)
    assert ols.DynamicLossScale(initial_scale=best)() == 2.0**127


def test_another_dtype_underflows_by_its_own_range():
    report = ols.diagnosis.underflow_report([jnp.float32(1e-20)], 1.0, jnp.bfloat16)
    assert report.total.underflow == 0
    assert "in bfloat16" in str(report)


def test_takes_a_number_a_loss_scale_or_a_state():
    tx = ols.with_loss_scale(optax.sgd(0.1), 128)
    for scale in (tx.init(jnp.ones(2)), ols.get(128), 128, np.float32(128), jnp.float32(128)):
        assert ols.diagnosis.underflow_report(jnp.ones(2), scale).loss_scale == 128
    with pytest.raises(ValueError, match="exactly one loss scale"):
        ols.diagnosis.underflow_report(jnp.ones(2), optax.sgd(0.1).init(jnp.ones(2)))
    with pytest.raises(ValueError, match="dtype must be a floating-point dtype, got"):
        ols.diagnosis.underflow_report(jnp.ones(2), 1.0, jnp.int8)


def test_the_table_names_leaves():
    lines = str(ols.diagnosis.underflow_report(GRADS, 4.0)).splitlines()
    assert [line.split()[0] for line in lines] == [
        "Gradients",
        "numbers",
        "a",
        "b/c",
        "all",
        "Best",
    ]
    assert lines[2].split() == ["a", "4", "50.0%", "25.0%", "25.0%", "0", "16.0"]
    assert len({len(line) for line in lines[1:5]}) == 1


def deep(layers):
    block = lambda i: {"mlp": {"w1": jnp.full(4, 10.0**-i), "w2": jnp.ones(4)}}
    return {"blocks": [block(i) for i in range(layers)], "head": jnp.full(2, 1e-5)}


def test_layers_are_one_row_and_the_worst_is_first():
    report = ols.diagnosis.underflow_report(deep(12), 1.0)
    rows = [line.split() for line in str(report).splitlines()[2:-1]]
    assert [row[0] for row in rows] == ["head", "blocks/*/mlp/w1", "blocks/*/mlp/w2", "all"]
    assert [row[1] for row in rows] == ["2", "48", "48", "98"]
    assert list(report.groups) == [row[0] for row in rows[:-1]]
    assert report.groups["blocks/*/mlp/w1"].zeros == sum(
        report.leaves[f"blocks/{i}/mlp/w1"].zeros for i in range(12)
    )


def test_overflows_come_before_all_else():
    report = ols.diagnosis.underflow_report(
        {"a": jnp.zeros(3), "b": jnp.array([1.0, jnp.inf])}, 1.0
    )
    assert list(report.groups) == ["b", "a"]


def test_the_table_is_short_and_fits_a_terminal():
    names = [f"{chr(97 + i)}/{'a_long_module_name/' * 6}kernel" for i in range(26)]
    report = ols.diagnosis.underflow_report({name: jnp.ones(3) for name in names}, 1.0)
    lines = str(report).splitlines()
    assert len(lines) == 25
    assert lines[-3] == "and 6 more"
    assert max(map(len, lines)) <= 100
    assert lines[2].startswith("a/a_long")


def test_of_many_models_it_says_to_take_one():
    scales = jnp.arange(1.0, 4)
    reports = jax.vmap(
        lambda scale: ols.diagnosis.underflow_report({"a": jnp.ones(3) * scale}, scale)
    )(scales)
    for read in (str, lambda r: r.total, lambda r: r.groups, lambda r: r.best_scale):
        with pytest.raises(TypeError, match=r"leaves of shape \(3,\); select one"):
            read(reports)
    assert "2**" in str(jax.tree.map(lambda x: x[0], reports))
