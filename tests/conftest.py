import chex
import jax
import pytest
from compiling import compile_quickly

# Both must precede the first computation. Several devices are simulated on the CPU.
compile_quickly()
jax.config.update("jax_num_cpu_devices", 4)


@pytest.fixture(autouse=True)
def _count_traces_anew():
    chex.clear_trace_counter()
