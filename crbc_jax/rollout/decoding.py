"""One jitted call of the embedded sampler: a bucket of prompts -> sampled tokens."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from crbc_jax.models.config import DecoderConfig
from crbc_jax.models.decoder import Cache, forward, init_cache, unembed

NO_TOKEN = -1
MAX_STOP_IDS = 8  # A fixed width: another number of stop ids compiles nothing.


class Rows(NamedTuple):
    """A bucket of requests; a padded row has max_tokens 0."""

    prompts: Int[Array, "rows length"]  # Padded on the left.
    lengths: Int[Array, " rows"]  # Of the prompts, at least 1.
    seeds: UInt32[Array, "rows 2"]  # As models.decoder.seed_words makes them.
    temperatures: Float[Array, " rows"]  # 0 is greedy.
    max_tokens: Int[Array, " rows"]
    stop_ids: Int[Array, "rows stops"]  # Padded with NO_TOKEN to MAX_STOP_IDS.


class _Decoding(NamedTuple):
    """What the decode loop carries."""

    number: Int[Array, ""]  # Of the next token, from 0.
    tokens: Int[Array, " rows"]  # The last ones, not in the cache yet.
    is_done: Bool[Array, " rows"]
    cache: Cache
    token_ids: Int[Array, "rows tokens"]
    logprobs: Float[Array, "rows tokens"]


@functools.partial(jax.jit, static_argnames=("config", "max_tokens"))
def sample(
    config: DecoderConfig, params: Any, rows: Rows, max_tokens: int
) -> tuple[Int[Array, "rows tokens"], Float[Array, "rows tokens"]]:
    """Returns token ids and their float32 log-probabilities, [rows, max_tokens].

    Prefills all but the last token of each prompt, then decodes from that one until
    every row has stopped. Ids after a row's end are NO_TOKEN. Tokens are drawn by the
    Gumbel-max trick from a key of (the row's seed, the token's number).
    """
    num_rows, length = rows.prompts.shape
    positions = jnp.arange(length) - (length - rows.lengths)[:, None]
    segment_ids = (positions >= 0).astype(jnp.int32)
    positions = jnp.maximum(positions, 0)
    dtype = params["embed"]["embedding"].dtype
    slots, apart = length - 1 + max_tokens, isinstance(params["layers"], tuple)
    cache = init_cache(config, num_rows, slots, dtype, apart=apart)
    prefix = (rows.prompts[:, :-1], positions[:, :-1], segment_ids[:, :-1])
    _, cache = forward(config, params, *prefix, cache)
    keys = jax.random.wrap_key_data(rows.seeds, impl="threefry2x32")
    is_greedy = rows.temperatures == 0
    scale = 1 / jnp.where(is_greedy, 1, rows.temperatures)
    ones = jnp.ones((num_rows, 1), jnp.int32)

    def draw(number, hidden):
        logits = unembed(config, params, hidden) * scale[:, None]
        # Rounding may lift the log-probability of a certain token above 0.
        logprobs = jnp.minimum(jax.nn.log_softmax(logits), 0.0)
        token_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, number)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))
        noisy = jax.lax.cond(  # Noise takes as long as a small model.
            jnp.all(is_greedy),
            lambda: logits,
            lambda: logits + jnp.where(is_greedy[:, None], 0.0, noise(token_keys)),
        )
        tokens = jnp.argmax(noisy, axis=-1).astype(jnp.int32)
        return tokens, jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]

    def is_unfinished(carry):
        return (carry.number < max_tokens) & ~jnp.all(carry.is_done)

    def decode(carry):
        hidden, cache = forward(
            config,
            params,
            carry.tokens[:, None],
            (rows.lengths - 1 + carry.number)[:, None],
            ones,
            carry.cache,
        )
        tokens, logprobs = draw(carry.number, hidden[:, 0])
        recorded = jnp.where(carry.is_done, NO_TOKEN, tokens)
        is_stop = jnp.any(tokens[:, None] == rows.stop_ids, axis=1)
        number = carry.number + 1
        return _Decoding(
            number=number,
            tokens=tokens,
            is_done=carry.is_done | is_stop | (number >= rows.max_tokens),
            cache=cache,
            token_ids=carry.token_ids.at[:, carry.number].set(recorded),
            logprobs=carry.logprobs.at[:, carry.number].set(logprobs),
        )

    carry = _Decoding(
        number=jnp.int32(0),
        tokens=rows.prompts[:, -1],
        is_done=rows.max_tokens == 0,
        cache=cache,
        token_ids=jnp.full((num_rows, max_tokens), NO_TOKEN, jnp.int32),
        logprobs=jnp.zeros((num_rows, max_tokens), jnp.float32),
    )
    carry = jax.lax.while_loop(is_unfinished, decode, carry)
    return carry.token_ids, carry.logprobs
