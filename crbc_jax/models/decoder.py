"""Qwen2 and Llama decoder: token ids -> hidden states -> float32 logits.

The modules below describe the network; training and sampling use the functions at the
end, on parameters that are a plain nested dictionary of arrays:

    embed/embedding        [vocab, hidden]
    layers/attention_norm/scale, layers/mlp_norm/scale           [layers, hidden]
    layers/attention/{query,key,value,out}/{kernel[,bias]}       [layers, in, out]
    layers/mlp/{gate,up,down}/{kernel[,bias]}                    [layers, in, out]
    .../lora_a [layers, in, rank], .../lora_b [layers, rank, out]    where adapted
    final_norm/scale       [hidden]
    head/kernel            [hidden, vocab], where it is not tied to the embedding

Attention heads lie head-major in the output axis of query, key and value. The layers
are scanned, so that compile time does not grow with their number, unless they come
apart (see `unstack`).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from crbc_jax.models import attention
from crbc_jax.models.config import DecoderConfig

# So few layers run a fifth faster unrolled, and compile no slower.
UNROLLED_LAYERS = 4
# What a scanned layer keeps for its gradient. To compute the rest anew costs less than
# to write it into the scan's stacks and read it back, even where memory is no concern.
_REMAT_POLICIES = {
    "none": jax.checkpoint_policies.dots_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}
REMAT = tuple(_REMAT_POLICIES)
_DRAWN = ("kernel", "embedding", "lora_a")  # Parameters that start at random.


class Cache(NamedTuple):
    """Keys and values of the tokens so far; all rows have the same number of slots.

    One array a layer where the layers come apart, else one array [layers, ...].
    """

    keys: Any  # [rows, slots, kv_heads, head_dim] of each layer.
    values: Any
    segment_ids: Int[Array, "rows slots"]
    length: Int[Array, ""]  # Slots in use.


class RMSNorm(nnx.Module):
    """Zhang and Sennrich (2019), in float32."""

    def __init__(self, size: int, epsilon: float):
        self.scale = nnx.Param(jnp.ones(size))
        self.epsilon = epsilon

    def __call__(self, inputs):
        x = inputs.astype(jnp.float32)
        x *= jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.epsilon)
        return (x * self.scale[...]).astype(inputs.dtype)


class Linear(nnx.Linear):
    """A product of the layers, with its adapter (see lora.py) if it has one."""

    def __init__(self, config: DecoderConfig, name, inputs, outputs, use_bias, rngs):
        super().__init__(inputs, outputs, use_bias=use_bias, rngs=rngs)
        self.lora_scale = 0.0
        if config.lora and name in config.lora.targets:
            self.lora_scale = config.lora.scale
            self.lora_a = nnx.Param(jnp.zeros((inputs, config.lora.rank)))
            self.lora_b = nnx.Param(jnp.zeros((config.lora.rank, outputs)))

    def __call__(self, x):
        y = super().__call__(x)
        if self.lora_scale:
            y += self.lora_scale * (x @ self.lora_a[...] @ self.lora_b[...])
        return y


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        hidden = config.hidden_size
        queries = config.num_heads * config.head_dim
        keys = config.num_kv_heads * config.head_dim
        linear = functools.partial(Linear, config, rngs=rngs)
        self.query = linear("query", hidden, queries, config.qkv_bias)
        self.key = linear("key", hidden, keys, config.qkv_bias)
        self.value = linear("value", hidden, keys, config.qkv_bias)
        self.out = linear("out", queries, hidden, config.out_bias)
        self.head_dim = config.head_dim

    def __call__(self, x, rotation, attend, layer, cache):
        """Returns the output, and the cache with this layer's new slots written.

        Args:
            attend: (query, key, value) -> what is gathered.
        """
        heads_shape = (*rotation.shape[:2], -1, self.head_dim)
        query = self.query(x).reshape(heads_shape)
        key = self.key(x).reshape(heads_shape)
        value = self.value(x).reshape(heads_shape)
        query = _rotate(query, rotation[:, :, None])
        key = _rotate(key, rotation[:, :, None])
        if cache is not None:
            keys = _append(cache.keys, key, layer, cache.length)
            values = _append(cache.values, value, layer, cache.length)
            cache = cache._replace(keys=keys, values=values)
            key, value = keys[layer], values[layer]
        mixed = attend(query, key, value)
        return self.out(mixed.reshape(x.shape[0], -1)), cache


class MLP(nnx.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        hidden, inner = config.hidden_size, config.intermediate_size
        linear = functools.partial(Linear, config, use_bias=config.mlp_bias, rngs=rngs)
        self.gate = linear("gate", hidden, inner)
        self.up = linear("up", hidden, inner)
        self.down = linear("down", inner, hidden)

    def __call__(self, x):
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Layer(nnx.Module):
    """Attention, then MLP, each on a normed copy and added back."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, rngs)

    def __call__(self, x, rotation, attend, layer, cache):
        mixed, cache = self.attention(
            self.attention_norm(x), rotation, attend, layer, cache
        )
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), cache


class Decoder(nnx.Module):
    """The whole network; its layers are one Layer with stacked parameters.

    Between the attentions, the tokens of all rows lie along one axis: XLA's CPU
    backend is three times slower at a weight gradient that sums over two axes.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = config
        self.embed = nnx.Embed(config.vocab_size, config.hidden_size, rngs=rngs)
        stack = nnx.vmap(lambda rngs: Layer(config, rngs))
        self.layers = stack(rngs.split(config.num_layers))
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_embeddings:
            self.head = nnx.Linear(
                config.hidden_size, config.vocab_size, use_bias=False, rngs=rngs
            )

    def __call__(
        self, tokens, positions, segment_ids, cache, branch_ids, remat, mesh, apart
    ):
        sizes = tokens.shape[1], self.config.num_kv_heads, self.config.head_dim
        is_plain = cache is None and branch_ids is None
        if is_plain and attention.can_splash(mesh, *sizes):
            attend = functools.partial(
                attention.splash, segment_ids=segment_ids, mesh=mesh
            )
        else:
            mask, cache = _visible(segment_ids, cache, branch_ids)
            attend = functools.partial(attention.attend, mask=mask)
        rotation = _rotation(self.config, positions)
        graph, stacked = nnx.split(self.layers)

        def run_layer(carry, inputs):
            x, cache = carry
            layer, params = inputs
            x, cache = nnx.merge(graph, params)(x, rotation, attend, layer, cache)
            return (x, cache), None

        is_unrolled = self.config.num_layers <= UNROLLED_LAYERS
        if cache is None and (remat != "none" or not is_unrolled):
            run_layer = jax.checkpoint(
                run_layer, policy=_REMAT_POLICIES[remat], prevent_cse=False
            )
        # nnx.Embed would cast to the dtype that its parameters had at first.
        carry = self.embed.embedding[...][tokens.reshape(-1)], cache
        if apart is None:
            numbers = jnp.arange(self.config.num_layers, dtype=jnp.int32)
            carry, _ = jax.lax.scan(
                run_layer, carry, (numbers, stacked), unroll=is_unrolled
            )
        else:
            for number, params in enumerate(apart):
                state = jax.tree.map(lambda leaf: leaf, stacked)
                nnx.replace_by_pure_dict(state, params)
                carry, _ = run_layer(carry, (number, state))
        x, cache = carry
        if cache is not None:
            cache = cache._replace(length=cache.length + tokens.shape[1])
        return self.final_norm(x).reshape(*tokens.shape, -1), cache

    def unembed(self, hidden):
        tied = self.config.tie_embeddings
        kernel = self.embed.embedding[...].T if tied else self.head.kernel[...]
        # Sampler and learner compare probabilities: no rounding of accelerators here.
        logits = jnp.matmul(
            hidden.reshape(-1, hidden.shape[-1]),
            kernel,
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        return logits.reshape(*hidden.shape[:-1], -1)


def seed_words(seed: int) -> np.ndarray:
    """Splits a seed below 2**64 into the uint32 [2] data of a threefry key."""
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed={seed!r} must be in [0, 2**64)")
    return np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)


def init_params(config: DecoderConfig, seed: int) -> dict[str, Any]:
    """Draws fresh float32 parameters, a function of `config` and `seed` alone.

    Kernels and embedding are normal with standard deviation
    `config.initializer_range`; biases are 0 and the scales of norms 1. Of adapters, A
    is drawn, too, and B is 0.
    """
    return _init_params(config, seed_words(seed))


def abstract_params(config: DecoderConfig) -> dict[str, Any]:
    """Shapes and dtypes of the parameters; makes no arrays, compiles nothing."""
    return nnx.to_pure_dict(_structure(config)[1])


def unstack(layers: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Returns stacked layers one by one, as `forward` takes them, too.

    For decoding, which reads all weights for each token: a scan would copy every
    layer's out of the stack first. It compiles longer.
    """
    num_layers = jax.tree.leaves(layers)[0].shape[0]
    return tuple(
        jax.tree.map(lambda leaf, n=n: leaf[n], layers) for n in range(num_layers)
    )


def init_cache(
    config: DecoderConfig, rows: int, slots: int, dtype: Any, *, apart: bool = False
) -> Cache:
    """An empty cache for `rows` sequences of at most `slots` tokens.

    Args:
        apart: for layers of `unstack`.
    """
    shape = (rows, slots, config.num_kv_heads, config.head_dim)

    def make():
        if apart:
            return tuple(jnp.zeros(shape, dtype) for _ in range(config.num_layers))
        return jnp.zeros((config.num_layers, *shape), dtype)

    return Cache(
        keys=make(),
        values=make(),
        segment_ids=jnp.zeros((rows, slots), jnp.int32),
        length=jnp.zeros((), jnp.int32),
    )


def forward(
    config: DecoderConfig,
    params: dict[str, Any],
    tokens: Int[Array, "rows length"],
    positions: Int[Array, "rows length"],
    segment_ids: Int[Array, "rows length"],
    cache: Cache | None = None,
    *,
    branch_ids: Int[Array, "rows length"] | None = None,
    remat: str = "none",
    mesh: Mesh | None = None,
) -> tuple[Float[Array, "rows length hidden"], Cache | None]:
    """Runs the decoder up to the states that `unembed` turns into logits.

    A token sees itself and what stands before it in its row (in the cache too) with
    the same segment id; segment 0 is padding, which nothing sees and whose own output
    means nothing. Computes in the dtype of `params`, norms and softmax in float32.

    Args:
        config: static under jit.
        params: as `init_params` makes them, "layers" stacked or from `unstack`;
            sharded or not.
        tokens: ids in [0, vocab_size).
        positions: of each token within its own sequence, from 0.
        segment_ids: sequences of a row differ in theirs.
        cache: if given, the tokens are appended to it; the caller sees to it that the
            slots suffice.
        branch_ids: without a cache: tokens of a segment see those of its branch 0 and
            of their own; None: a segment has but one.
        remat: what the layers compute again for their gradient, instead of keeping
            it: "none" (no matrix product), "dots" (those of attention, too) or "full"
            (everything).
        mesh: on a TPU's, sequences without cache and branches run splash attention.

    Returns:
        The normed hidden states, and the cache with the tokens in it (None without).
    """
    apart = None
    if isinstance(params["layers"], tuple):
        apart = params["layers"]
        params = params | {"layers": apart[0]}
    model = _merge(config, params)
    return model(tokens, positions, segment_ids, cache, branch_ids, remat, mesh, apart)


def unembed(
    config: DecoderConfig,
    params: dict[str, Any],
    hidden: Float[Array, "*batch hidden"],
) -> Float[Array, "*batch vocab"]:
    """Turns hidden states of `forward` into float32 logits, whatever their dtype."""
    if isinstance(params["layers"], tuple):
        params = params | {"layers": params["layers"][0]}
    return _merge(config, params).unembed(hidden)


@functools.partial(jax.jit, static_argnames="config")
def _init_params(config, words):
    paths, tree = jax.tree_util.tree_flatten_with_path(abstract_params(config))
    drawn = [leaf.size for path, leaf in paths if path[-1].key in _DRAWN]
    # One draw for all: a draw per array takes four times as long to compile.
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    values = config.initializer_range * jax.random.normal(key, (sum(drawn),))
    pieces = iter(jnp.split(values, np.cumsum(drawn)[:-1]))
    fill = {"scale": jnp.ones, "bias": jnp.zeros, "lora_b": jnp.zeros}
    params = [
        next(pieces).reshape(leaf.shape)
        if path[-1].key in _DRAWN
        else fill[path[-1].key](leaf.shape)
        for path, leaf in paths
    ]
    return jax.tree.unflatten(tree, params)


@functools.lru_cache(maxsize=16)
def _structure(config: DecoderConfig) -> tuple[Any, Any]:
    """Graph and abstract state of a decoder; makes no arrays."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(params=0))))


def _merge(config: DecoderConfig, params: dict[str, Any]) -> Decoder:
    graph, state = _structure(config)
    state = jax.tree.map(lambda leaf: leaf, state)  # A copy: filled in place below.
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


def _append(held, new, layer, length):
    """Writes a layer's new slots behind the `length` in use."""
    if not isinstance(held, tuple):
        start = (layer, 0, length, 0, 0)
        return jax.lax.dynamic_update_slice(held, new[None], start)
    written = jax.lax.dynamic_update_slice(held[layer], new, (0, length, 0, 0))
    return held[:layer] + (written,) + held[layer + 1 :]


def _visible(segment_ids, cache, branch_ids):
    """Returns mask [rows, length, slots], True = seen, and the cache with segments."""
    length = segment_ids.shape[1]
    slots = jnp.arange(length, dtype=jnp.int32)
    if cache is None:
        seen_segments, query_slots = segment_ids, slots
    else:
        start = (jnp.int32(0), cache.length)
        seen_segments = jax.lax.dynamic_update_slice(
            cache.segment_ids, segment_ids, start
        )
        cache = cache._replace(segment_ids=seen_segments)
        query_slots = cache.length + slots
        slots = jnp.arange(seen_segments.shape[1], dtype=jnp.int32)
    is_before = slots[None, :] <= query_slots[:, None]
    is_same = segment_ids[:, :, None] == seen_segments[:, None, :]
    if branch_ids is not None:
        seen = branch_ids[:, None, :]
        is_same &= (seen == 0) | (seen == branch_ids[:, :, None])
    return is_before & is_same & (segment_ids != 0)[:, :, None], cache


def _rotation(config: DecoderConfig, positions):
    """Cosines and sines of RoFormer (Su et al. 2021), [rows, length, head_dim]."""
    frequencies = np.float32(_frequencies(config))
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def _frequencies(config: DecoderConfig) -> np.ndarray:
    """Radians a position, float64 [head_dim / 2], scaled as Llama 3's if asked to."""
    half = np.arange(0, config.head_dim, 2) / config.head_dim
    frequencies = config.rope_theta**-half
    if (scaling := config.rope_scaling) is None:
        return frequencies
    turns = scaling.original_max_positions * frequencies / (2 * np.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def _rotate(x, rotation):
    """Turns the pairs (i, i + head_dim / 2), the layout of Hugging Face weights."""
    cosine, sine = jnp.split(rotation, 2, axis=-1)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cosine - second * sine, second * cosine + first * sine]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
