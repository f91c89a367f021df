"""A function of groups -> the same function, with the groups spread over devices."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from crbc_jax.types import TransitionBatch


def over_groups(
    function: Callable[[TransitionBatch], Any],
    mesh: Mesh,
    axes: Sequence[str] = ("data",),
) -> Callable[[TransitionBatch], Any]:
    """Lets each device compute its own groups, without any communication.

    Left to itself the compiler gathers all systems of a batched solve on every device.

    Args:
        function: of a batch, to arrays whose first axis is the groups. It must treat
            groups alone, as all estimators do but those that whiten the whole batch.
        mesh: the devices.
        axes: of the mesh, over which groups are split; other axes repeat the work.

    Returns:
        The jitted function. It raises ValueError if the groups do not divide evenly.
    """
    spec = P(tuple(axes))
    parts = math.prod(mesh.shape[axis] for axis in axes)
    # Nothing is exchanged, so there is nothing to check: without it, loops may start
    # from constants, which are the same on all devices.
    split = jax.shard_map(
        function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )

    def run(batch: TransitionBatch) -> Any:
        num_groups = batch.mask.shape[0]
        if num_groups % parts:
            raise ValueError(
                f"{num_groups} groups (after padding) do not divide over the {parts} "
                f"devices of mesh axes {list(axes)}; use a mesh of fewer devices"
            )
        return split(batch)

    return jax.jit(run)
