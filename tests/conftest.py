"""Test session setup: platform, devices, hypothesis profiles, instruction sets."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)  # for the tests of sharding

# A new shape compiles, which takes longer than hypothesis' deadline. The cases are the same in
# every run; NVFP4_EXHAUSTIVE=1 draws many more, of its own.
hypothesis.settings.register_profile("default", deadline=None, max_examples=25, derandomize=True)
hypothesis.settings.register_profile("exhaustive", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(
    "exhaustive" if os.environ.get("NVFP4_EXHAUSTIVE") == "1" else "default"
)


def pytest_generate_tests(metafunc):
    """A test that takes `instruction_set` runs with each that this machine has."""
    if "instruction_set" in metafunc.fixturenames:
        from jax_nvfp4_ops import _native

        metafunc.parametrize("instruction_set", _native.instruction_sets(), indirect=True)


@pytest.fixture
def instruction_set(request):
    from jax_nvfp4_ops import _native

    previous = _native.select_instruction_set(request.param)
    yield request.param
    _native.select_instruction_set(previous)


@pytest.fixture(scope="module", autouse=True)
def compiled_programs_of_one_module():
    """A thousand shapes compile a thousand programs: they go with the module that needed them."""
    yield
    jax.clear_caches()
