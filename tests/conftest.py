import chex
import jax
import pytest

# Several devices are simulated on the CPU; must precede the first computation.
jax.config.update("jax_num_cpu_devices", 4)


@pytest.fixture(autouse=True)
def _count_traces_anew():
    chex.clear_trace_counter()
