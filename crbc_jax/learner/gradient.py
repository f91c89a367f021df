"""What every kind of training step shares: forward pass, accumulation, optimiser."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from crbc_jax import distributed
from crbc_jax.learner import sharding, trainable
from crbc_jax.learner.logprobs import token_logprobs
from crbc_jax.learner.rows import Rows
from crbc_jax.models.config import DecoderConfig
from crbc_jax.models.decoder import forward, init_params
from crbc_jax.types import TrainState

# (params, one micro-batch) -> its share of the loss, and two trees of scalars: those to
# sum over micro-batches, and those (not negative) of which the largest is wanted.
Objective = Callable[[Any, Any], tuple[Float[Array, ""], tuple[Any, Any]]]


DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Compute:
    """How the decoder is run for a training step; changes rounding alone."""

    dtype: str = "float32"  # Parameters are cast to it for each pass.
    remat: str = "none"  # See `models.decoder.forward`.


DEFAULT_COMPUTE = Compute()


def make_optimizer(
    learning_rate: float,
    weight_decay: float,
    max_grad_norm: float,
    moment_dtype: str = "float32",
) -> optax.GradientTransformation:
    """AdamW (arXiv 1711.05101) at a constant rate, after clipping the global norm.

    Args:
        moment_dtype: of the first moment. The second is always as the parameters: in
            bfloat16 its decay of a thousandth a step would be rounded away.
    """
    return optax.chain(
        optax.clip_by_global_norm(max_grad_norm),
        optax.adamw(
            learning_rate, weight_decay=weight_decay, mu_dtype=jnp.dtype(moment_dtype)
        ),
    )


def abstract_state(
    decoder_config: DecoderConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    keep_reference: bool,
) -> TrainState:
    """Shapes, dtypes and shardings of the state; makes no arrays, compiles nothing.

    The reference is a copy of the trainable parameters alone: of adapters, next to
    nothing, and fresh ones are the frozen model itself.
    """
    params = jax.eval_shape(lambda: init_params(decoder_config, 0))
    trained, _ = trainable.split(params)
    state = TrainState(
        params=params,
        opt_state=jax.eval_shape(optimizer.init, trained),
        reference=trained if keep_reference else None,
        step=jax.ShapeDtypeStruct((), jnp.int32),
    )
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=where
        ),
        state,
        sharding.tree_shardings(state, mesh),
    )


def make_init(
    optimizer: optax.GradientTransformation, abstract: TrainState
) -> Callable[[Any], TrainState]:
    """Returns the function params -> fresh state, as `abstract` describes it.

    It copies the parameters, which stay valid when the state is donated.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    keep_reference = abstract.reference is not None

    @functools.partial(jax.jit, out_shardings=shardings)
    def init(params):
        trained, _ = trainable.split(params)
        return TrainState(
            params=jax.tree.map(jnp.copy, params),
            opt_state=optimizer.init(trained),
            reference=jax.tree.map(jnp.copy, trained) if keep_reference else None,
            step=jnp.zeros((), jnp.int32),
        )

    return lambda params: init(distributed.place(params, shardings.params))


def response_logprobs(
    decoder_config: DecoderConfig,
    params: Any,
    rows: Rows,
    temperature: float,
    mesh: Mesh,
    compute: Compute = DEFAULT_COMPUTE,
) -> tuple[Float[Array, "rows responses"], Float[Array, "rows responses"]]:
    """Log-probability of each response token and the entropy there, at `temperature`.

    Only states that predict a response token are turned into logits: most tokens are
    prompt, and the vocabulary is the widest axis of all. Masked entries mean nothing.
    """
    params = jax.tree.map(lambda leaf: leaf.astype(compute.dtype), params)
    hidden, _ = forward(
        decoder_config,
        params,
        rows.tokens,
        rows.positions,
        rows.segment_ids,
        branch_ids=rows.branch_ids,
        remat=compute.remat,
        mesh=mesh,
    )
    hidden = jnp.take_along_axis(hidden, rows.response_index[..., None], axis=1)
    return token_logprobs(
        decoder_config, params, hidden, rows.response_ids, temperature, mesh
    )


def accumulate(
    objective: Objective,
    params: Any,
    microbatches: Any,
    num_microbatches: Int[Array, ""],
    mesh: Mesh,
) -> tuple[Any, Float[Array, ""], Any, Any]:
    """Sums loss, gradient and scalars over the first `num_microbatches`, one by one.

    The number is traced, hence one compilation for all of them.

    Args:
        params: those to differentiate by; None among them is skipped.
        microbatches: tree of arrays [microbatches, ...].

    Returns:
        Gradient (0 if there is no micro-batch), loss, summed and largest scalars.
    """
    shardings = sharding.tree_shardings(params, mesh)
    value_and_grad = jax.value_and_grad(objective, has_aux=True)

    def run(index):
        microbatch = jax.tree.map(
            lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False),
            microbatches,
        )
        (loss, (sums, maxima)), gradient = value_and_grad(params, microbatch)
        gradient = jax.lax.with_sharding_constraint(gradient, shardings)
        return (gradient, loss, sums), maxima

    if jax.tree.leaves(microbatches)[0].shape[0] == 1:
        # The only one; its buffer is all padding if none is in use. No second gradient.
        (gradient, loss, sums), maxima = run(0)
        return gradient, loss, sums, maxima

    def add(index, carry):
        total, largest = carry
        new, maxima = run(index)
        return (
            jax.tree.map(jnp.add, total, new),
            jax.tree.map(jnp.maximum, largest, maxima),
        )

    shapes = jax.eval_shape(run, jax.ShapeDtypeStruct((), jnp.int32))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    total, maxima = jax.lax.fori_loop(0, num_microbatches, add, zeros)
    gradient, loss, sums = total
    return gradient, loss, sums, maxima


def apply_gradient(
    optimizer: optax.GradientTransformation,
    state: TrainState,
    gradient: Any,
    loss: Float[Array, ""],
    is_wanted: Array | bool,
) -> tuple[TrainState, dict[str, Array]]:
    """One optimiser step, unless it is not wanted, or loss or gradient not finite.

    The state then comes back bit for bit, so that a run can stop at its last good one.

    Args:
        gradient: of the trainable parameters; see trainable.py.

    Returns:
        The state, and `grad_norm` (before clipping), `nonfinite` and `skipped` (1 or
        0; skipped counts the unwanted ones alone).
    """
    grad_norm = optax.tree.norm(gradient)
    is_finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss)
    params, frozen = trainable.split(state.params)
    updates, opt_state = optimizer.update(gradient, state.opt_state, params)
    stepped = state._replace(
        params=trainable.merge(optax.apply_updates(params, updates), frozen),
        opt_state=opt_state,
        step=state.step + 1,
    )
    is_applied = is_finite & is_wanted
    state = jax.tree.map(
        lambda new, old: jnp.where(is_applied, new, old), stepped, state
    )
    return state, {
        "grad_norm": grad_norm,
        "nonfinite": 1.0 - is_finite,
        "skipped": 1.0 - jnp.asarray(is_wanted),
    }
