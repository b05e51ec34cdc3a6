"""The accelerators that programs are compiled for, without having any of them.

The compilers come with the extra `compilers`. They get the target by name, or by the
description of a device, and look for no driver and no device.
"""

import dataclasses
import importlib.util
import os
import pathlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

# libtpu would ask the cloud which machine this is, and let only one process at a time
# load it.
_LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
DEVICES = 8


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """An accelerator to compile for.

    Attributes:
      name: as people call it.
      platform: as JAX calls it.
      module: what is installed if its compiler is.
      one: further arguments of `get_topology_desc` for as few devices as there can be.
      many: the same for `DEVICES` of them.
    """

    name: str
    platform: str
    module: str
    one: dict[str, str]
    many: dict[str, str]

    @property
    def is_installed(self) -> bool:
        """Whether its compiler is installed; if it does not work, that is an error elsewhere."""
        try:
            return importlib.util.find_spec(self.module) is not None
        except ModuleNotFoundError:  # the package that it would be in
            return False

    def as_default(self) -> Any:
        """A context in which JAX's default backend is this one, as where there is one."""
        return mock.patch("jax.default_backend", return_value=self.platform)

    def device(self) -> SingleDeviceSharding:
        """The placement on a single device."""
        return SingleDeviceSharding(self._devices(self.one)[0])

    def mesh(self) -> Mesh:
        """A mesh of `DEVICES` devices along one axis, `data`."""
        devices = np.array(self._devices(self.many))
        return Mesh(devices, ("data",), axis_types=(AxisType.Auto,))

    def _devices(self, topology: dict[str, str]) -> list[jax.Device]:
        # Else the plugins look for devices, find none, and compile no more.
        jax.config.update("jax_platforms", "cpu")
        for name, value in _LIBTPU.items():
            os.environ.setdefault(name, value)
        return topologies.get_topology_desc(platform=self.platform, **topology).devices


def _gpu(name: str) -> Target:
    text = pathlib.Path(__file__).with_name(f"{name.lower()}.txtpb").read_text()
    topology = lambda shape: {"topology": shape, "target_config": text}
    one, many = topology("1x1x1"), topology(f"1x1x{DEVICES}")
    return Target(name, "cuda", "jax_plugins.xla_cuda12", one, many)


H100 = _gpu("H100")  # recorded on one
# Written after their data sheets.
V100 = _gpu("V100")
T4 = _gpu("T4")
V5E = Target(
    "v5e",
    "tpu",
    "libtpu",
    one={"topology_name": "v5e:2x2"},
    many={"topology_name": "v5e:2x4"},
)
TARGETS = {target.name: target for target in (H100, V100, T4, V5E)}


def place(tree: Any, placement: Any) -> Any:
    """The shapes and dtypes of a tree of arrays, on devices that may not exist.

    Args:
      tree: arrays, or what `jax.eval_shape` makes of them.
      placement: a sharding, or a function from each leaf to one.
    """
    sharding = placement if callable(placement) else lambda x: placement
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(x)), tree
    )


def by_rows(mesh: Mesh) -> Callable[[Any], NamedSharding]:
    """A placement by the first dimension, for arrays that have one."""
    spec = PartitionSpec(mesh.axis_names)
    return lambda x: NamedSharding(mesh, spec if x.ndim else PartitionSpec())
