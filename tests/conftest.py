import chex
import hypothesis
import jax
import pytest
from compiling import compile_quickly

# Both must precede the first computation. Several devices are simulated on the CPU.
compile_quickly()
jax.config.update("jax_num_cpu_devices", 4)

# `.ci/run slow` tries more examples of each property.
hypothesis.settings.register_profile("quick", deadline=None, max_examples=10)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=100)
hypothesis.settings.load_profile("quick")


@pytest.fixture(autouse=True)
def _count_traces_anew():
    chex.clear_trace_counter()
