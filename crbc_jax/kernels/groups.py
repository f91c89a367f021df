"""A function of groups -> the same function, spread over devices or over time.

Groups never talk to each other, so they may be computed anywhere and in any order.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from crbc_jax.types import TransitionBatch

MAX_CELLS = 2**14  # Groups times rows computed at once; they stay in a CPU's cache.


def over_groups(
    function: Callable[[TransitionBatch], Any], devices: Sequence[jax.Device]
) -> Callable[[TransitionBatch], Any]:
    """Lets each device compute its own groups, without any communication.

    Left to itself the compiler gathers all systems of a batched solve on every device.

    Args:
        function: of a batch, to arrays whose first axis is the groups. It must treat
            groups alone, as all estimators do but advantages.WHOLE_BATCH.
        devices: as many of them are used as divide the number of groups, a power of
            two, evenly.

    Returns:
        The jitted function.
    """

    def run(batch: TransitionBatch) -> Any:
        parts = math.gcd(batch.mask.shape[0], len(devices))
        if parts == 1:
            return function(batch)
        leaves, tree = jax.tree.flatten(batch)
        # Nothing is exchanged, so there is nothing to check: without it, loops may
        # start from constants, which are the same on all devices.
        split = jax.shard_map(
            lambda leaves: function(tree.unflatten(leaves)),
            mesh=Mesh(np.array(devices[:parts]), ("groups",)),
            in_specs=(P("groups"),),
            out_specs=P("groups"),
            check_vma=False,
        )
        return split(leaves)

    return jax.jit(run)


def in_chunks(
    function: Callable[[TransitionBatch], Any], batch: TransitionBatch
) -> Any:
    """Computes a large batch a few groups at a time.

    So that memory stays bounded, and a row of a large batch costs no more than one of
    a small batch, whose arrays fit into the cache.

    Args:
        function: of a batch, to arrays whose first axis is the groups.
        batch: of at most MAX_CELLS cells it is computed at once.
    """
    num_groups, num_rows = batch.mask.shape
    size = math.gcd(num_groups, max(1, MAX_CELLS // num_rows))
    if size == num_groups:
        return function(batch)
    leaves, tree = jax.tree.flatten(batch)
    chunks = [x.reshape(-1, size, *x.shape[1:]) for x in leaves]
    results = jax.lax.map(lambda leaves: function(tree.unflatten(leaves)), chunks)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), results)
