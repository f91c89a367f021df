"""Devices -> a (data, fsdp, tensor) mesh; names of parameters -> where they lie on it.

Rows are split over data and fsdp together. Parameters, their gradients and moments are
split over fsdp (and gathered where they are used) and over tensor (heads, inner units
and vocabulary). The same functions serve one device and many.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from crbc_jax import distributed
from crbc_jax.types import UserError

AXES = ("data", "fsdp", "tensor")
ROW_AXES = ("data", "fsdp")

# End of a parameter's path -> its axes; the first that fits decides. Moments of the
# optimiser have their parameter's name at the end of theirs.
_RULES = (
    (r"embed/embedding$", P("tensor", "fsdp")),
    (r"head/kernel$", P("fsdp", "tensor")),
    (r"(query|key|value|gate|up)/kernel$", P(None, "fsdp", "tensor")),
    (r"(query|key|value|gate|up)/bias$", P(None, "tensor")),
    (r"(out|down)/kernel$", P(None, "tensor", "fsdp")),
    # Low-rank adapters: as their kernel, but the rank stays whole.
    (r"(query|key|value|gate|up)/lora_a$", P(None, "fsdp", None)),
    (r"(query|key|value|gate|up)/lora_b$", P(None, None, "tensor")),
    (r"(out|down)/lora_a$", P(None, "tensor", None)),
    (r"(out|down)/lora_b$", P(None, None, "fsdp")),
)


def make_mesh(
    *,
    data: int = -1,
    fsdp: int = 1,
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Arranges the devices; one of the sizes may be -1, for all that remain.

    Raises:
        UserError: naming config.mesh.*, if the sizes do not make up the devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    text = ", ".join(f"config.mesh.{name}={size}" for name, size in sizes.items())
    open_axes = [name for name, size in sizes.items() if size == -1]
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if any(size < 1 and size != -1 for size in sizes.values()) or len(open_axes) > 1:
        raise UserError(
            f"{text}: each must be at least 1, or one of them -1 for what remains"
        )
    if open_axes:
        sizes[open_axes[0]] = len(devices) // fixed
    if math.prod(sizes.values()) != len(devices) or not all(sizes.values()):
        raise UserError(
            f"{text} do not multiply to the {len(devices)} devices there are; set "
            "config.mesh.data=-1 and let fsdp x tensor divide their number"
        )
    return jax.make_mesh(
        tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices
    )


def num_row_parts(mesh: Mesh) -> int:
    """Number of parts that rows are split into."""
    return math.prod(mesh.shape[axis] for axis in ROW_AXES)


def check_rows(num_rows: int, mesh: Mesh, field: str) -> None:
    """Refuses rows that do not split evenly over the mesh.

    Raises:
        UserError: naming `field`, and the nearest number that does.
    """
    parts = num_row_parts(mesh)
    if num_rows % parts:
        raise UserError(
            f"{field}={num_rows} must be a multiple of the {parts} devices along "
            f"{' x '.join(ROW_AXES)}; use {math.ceil(num_rows / parts) * parts}"
        )


def replicated(mesh: Mesh) -> NamedSharding:
    """The same on every device."""
    return NamedSharding(mesh, P())


def microbatch_sharding(mesh: Mesh) -> NamedSharding:
    """Of arrays [microbatches, rows, ...]: every device has its rows of each."""
    return NamedSharding(mesh, P(None, ROW_AXES))


def put_microbatches(tree: Any, mesh: Mesh) -> Any:
    """Puts host arrays, equal in all processes, where `microbatch_sharding` says.

    Scalars go everywhere. With one process nothing is to do: jit does it.
    """
    if jax.process_count() == 1:
        return tree
    by_rows, everywhere = microbatch_sharding(mesh), replicated(mesh)
    shardings = jax.tree.map(lambda x: by_rows if x.ndim else everywhere, tree)
    return distributed.place(tree, shardings)


def tree_shardings(tree: Any, mesh: Mesh) -> Any:
    """A sharding for each leaf of parameters, or of a whole TrainState.

    An axis that its mesh axis does not divide stays whole, as do leaves that no rule
    names (norms, counters).

    Args:
        tree: arrays or `jax.ShapeDtypeStruct`s.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, _spec(path, leaf.shape, mesh)), tree
    )


def _spec(path, shape: tuple[int, ...], mesh: Mesh) -> P:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    for pattern, axes in _RULES:
        if re.search(pattern, name) and len(axes) == len(shape):
            return P(
                *(
                    axis if axis is None or size % mesh.shape[axis] == 0 else None
                    for axis, size in zip(axes, shape, strict=True)
                )
            )
    return P()
