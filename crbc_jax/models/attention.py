"""Queries, keys and values -> what each token gathers from those that it sees."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

_LANES = 128  # Of a TPU's vector unit: splash wants sizes that are multiples of it.
_BLOCKS = (512, 256, 128)  # Tokens of a tile, by preference.


def attend(
    query: Float[Array, "rows length heads head_dim"],
    key: Float[Array, "rows slots kv_heads head_dim"],
    value: Float[Array, "rows slots kv_heads head_dim"],
    mask: Bool[Array, "rows length slots"],
) -> Float[Array, "rows length heads head_dim"]:
    """Grouped-query attention where `mask` is True, by XLA; softmax in float32.

    A token that sees nothing gets a finite value that means nothing.
    """
    return jax.nn.dot_product_attention(query, key, value, mask=mask[:, None])


def can_splash(
    mesh: Mesh | None, length: int, num_kv_heads: int, head_dim: int
) -> bool:
    """Whether `splash` serves rows of these sizes: on a TPU, where they divide."""
    return (
        mesh is not None
        and mesh.devices.flat[0].platform == "tpu"
        and length % _LANES == 0
        and head_dim % _LANES == 0
        and num_kv_heads % mesh.shape["tensor"] == 0
    )


def splash(
    query: Float[Array, "rows length heads head_dim"],
    key: Float[Array, "rows length kv_heads head_dim"],
    value: Float[Array, "rows length kv_heads head_dim"],
    segment_ids: Int[Array, "rows length"],
    mesh: Mesh,
    *,
    interpret: bool = False,
) -> Float[Array, "rows length heads head_dim"]:
    """Causal attention within segments; no [length, length] array ever exists.

    By JAX's splash kernel, for sizes that `can_splash` admits. Each device has its
    rows (over data and fsdp) and its heads (over tensor). Padding, segment 0, gathers
    from padding, which means nothing.

    Args:
        interpret: run the kernel without a TPU, slowly: for tests.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as kernels

    length, heads, head_dim = query.shape[1:]
    heads //= mesh.shape["tensor"]
    block = next(size for size in _BLOCKS if length % size == 0)
    sizes = kernels.BlockSizes(
        **{
            f"block_{name}": block
            for name in "q kv kv_compute q_dkv kv_dkv kv_dkv_compute q_dq kv_dq".split()
        }
    )

    def local(query, key, value, segment_ids):
        kernel = kernels.make_splash_mha_single_device(
            kernels.MultiHeadMask([kernels.CausalMask((length, length))] * heads),
            block_sizes=sizes,
            interpret=interpret,
        )
        by_head = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
        segments = kernels.SegmentIds(q=segment_ids, kv=segment_ids)
        return jnp.swapaxes(jax.vmap(kernel)(*by_head, segments), 1, 2)

    by_row = ("data", "fsdp")
    by_head = P(by_row, None, "tensor")
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(by_head, by_head, by_head, P(by_row)),
        out_specs=by_head,
        check_vma=False,  # The kernel does not say how its outputs vary.
    )(query * np.float32(head_dim**-0.5).astype(query.dtype), key, value, segment_ids)
