"""Hidden states -> log-probability of each token, never all logits at once.

The logits [tokens, vocab] of a batch would be its widest array by far. Here only those
of a chunk of tokens exist, and are computed again for the gradient.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from crbc_jax.learner import losses, sharding
from crbc_jax.models.config import DecoderConfig

# Float32 logits that a device holds at once, 256 MiB; what fits is not cut at all.
MAX_LOGITS = 2**26


def token_logprobs(
    config: DecoderConfig,
    params: dict[str, Any],
    hidden: Float[Array, "rows tokens hidden"],
    token_ids: Int[Array, "rows tokens"],
    temperature: float,
    mesh: Mesh,
) -> tuple[Float[Array, "rows tokens"], Float[Array, "rows tokens"]]:
    """Log-probability of each token, never positive, and the entropy there, in nats.

    Equal to `losses.logprobs_and_entropy` of the decoder's `unembed`, in value and
    gradient. On several devices each has its rows and its part of the vocabulary: the
    head is gathered over fsdp once, before the chunks, and its gradient is summed over
    the devices once, after them. Over tensor only sums of a chunk's tokens travel.

    Args:
        config: static under jit.
        params: as `init_params` makes them, sharded by `sharding.tree_shardings`; the
            head is used in the dtype of `hidden`.
        hidden: normed states of `forward` before the tokens; `rows` must divide over
            the mesh's row axes.
        token_ids: in [0, vocab_size).
        temperature: of the distribution, positive.
        mesh: of `sharding.make_mesh`; of one device, nothing is communicated.
    """
    name = "embed/embedding" if config.tie_embeddings else "head/kernel"
    folder, leaf = name.split("/")
    kernel = params[folder][leaf].astype(hidden.dtype)
    vocab = 0 if config.tie_embeddings else 1  # Which axis of the kernel it is.
    spec = sharding.tree_shardings({folder: {leaf: kernel}}, mesh)[folder][leaf].spec
    if mesh.size == 1:
        spec = P(None, None)
    vocab_axis, hidden_axis = spec[vocab], spec[1 - vocab]

    def local(hidden, kernel, token_ids):
        if hidden_axis is not None:
            # The barrier keeps the sum of its gradient where it is: XLA for TPU fails
            # to move it out of the loop over micro-batches (a RET_CHECK, jax 0.10.2).
            kernel = jax.lax.optimization_barrier(kernel)
            kernel = jax.lax.all_gather(kernel, hidden_axis, axis=1 - vocab, tiled=True)
        if mesh.size > 1:
            # Else every chunk would sum its gradient of the head over the devices.
            missing = tuple(axis for axis in sharding.ROW_AXES if axis not in spec)
            kernel = jax.lax.pcast(kernel, missing, to="varying")
        kernel = kernel if vocab else kernel.T
        return _in_chunks(hidden, kernel, token_ids, temperature, vocab_axis)

    if mesh.size == 1:
        return local(hidden, kernel, token_ids)
    by_rows = P(sharding.ROW_AXES)
    split = jax.shard_map(
        local, mesh=mesh, in_specs=(by_rows, spec, by_rows), out_specs=by_rows
    )
    return split(hidden, kernel, token_ids)


def _in_chunks(hidden, kernel, token_ids, temperature, vocab_axis):
    """Of the tokens and the vocabulary of one device; kernel [hidden, vocab]."""
    shape = token_ids.shape
    num_tokens, vocab = token_ids.size, kernel.shape[1]
    hidden = hidden.reshape(num_tokens, -1)
    token_ids = token_ids.reshape(num_tokens)
    score = functools.partial(
        _score, temperature=temperature, vocab_axis=vocab_axis, dtype=hidden.dtype
    )
    num_chunks = math.ceil(num_tokens * vocab / MAX_LOGITS)
    if num_chunks <= 1:
        logprobs, entropy = score(kernel, hidden, token_ids)
        return logprobs.reshape(shape), entropy.reshape(shape)
    size = 8 * math.ceil(num_tokens / num_chunks / 8)  # Vector units like eights.
    num_chunks = math.ceil(num_tokens / size)
    padding = num_chunks * size - num_tokens
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(num_chunks, size, -1)
    token_ids = jnp.pad(token_ids, (0, padding)).reshape(num_chunks, size)
    # Its gradient is then a float32 sum over the chunks; the copy itself is never made.
    kernel = kernel.astype(jnp.float32)
    score = jax.checkpoint(score)
    results = jax.lax.map(lambda chunk: score(kernel, *chunk), (hidden, token_ids))
    logprobs, entropy = (x.reshape(-1)[:num_tokens].reshape(shape) for x in results)
    return logprobs, entropy


def _score(kernel, hidden, token_ids, temperature, vocab_axis, dtype):
    """Log-probability and entropy of a chunk; the logits do not leave it."""
    logits = jnp.matmul(
        hidden,
        kernel.astype(dtype),
        precision=jax.lax.Precision.HIGHEST,  # As the decoder's `unembed`.
        preferred_element_type=jnp.float32,
    )
    return losses.logprobs_and_entropy(logits, token_ids, temperature, vocab_axis)
