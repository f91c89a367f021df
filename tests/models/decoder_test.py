import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crbc_jax.models.config import DecoderConfig
from crbc_jax.models.decoder import (
    forward,
    init_cache,
    init_params,
    seed_words,
    unembed,
    unstack,
)

QWEN2 = DecoderConfig(
    vocab_size=11,
    hidden_size=12,
    intermediate_size=20,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,  # Unlike hidden_size / num_heads.
    rms_norm_eps=1e-6,
    rope_theta=100.0,
    rope_scaling=None,
    tie_embeddings=True,
    qkv_bias=True,
    out_bias=False,
    mlp_bias=False,
    initializer_range=0.3,
    max_positions=64,
)
LLAMA = dataclasses.replace(
    QWEN2, qkv_bias=False, tie_embeddings=False, num_layers=5, num_kv_heads=1
)
BIASED = dataclasses.replace(LLAMA, qkv_bias=True, out_bias=True, mlp_bias=True)
CONFIGS = {"qwen2": QWEN2, "llama": LLAMA, "biased": BIASED}


def random_params(config, seed=0):
    """Random kernels, and biases and scales away from the 0 and 1 of init_params."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        center = 1.0 if path[-1].key == "scale" else 0.0
        return np.float32(rng.normal(center, 0.3, leaf.shape))

    shapes = jax.eval_shape(lambda: init_params(config, 0))
    return jax.tree_util.tree_map_with_path(draw, shapes)


def assert_logits_close(actual, expected):
    """Equal up to float32 rounding, relative to the largest logit."""
    tolerance = 3e-6 * np.abs(expected).max()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


@jax.jit(static_argnums=0)
def logits_of(config, params, tokens, positions, segment_ids):
    hidden, _ = forward(config, params, tokens, positions, segment_ids)
    return unembed(config, params, hidden)


def linear(x, weights):
    return x @ weights["kernel"] + weights.get("bias", 0.0)


def normed(x, scale, epsilon):
    return x / np.sqrt(np.mean(x * x) + epsilon) * scale


def rotated(x, position, theta):
    """One head's channels, turned pair by pair."""
    half = len(x) // 2
    turned = np.empty_like(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        turned[i] = x[i] * np.cos(angle) - x[i + half] * np.sin(angle)
        turned[i + half] = x[i + half] * np.cos(angle) + x[i] * np.sin(angle)
    return turned


def oracle(config, params, tokens):
    """Float64 logits [length, vocab] of one sequence, by loops over tokens and heads.

    Written from the papers and the Hugging Face weight layout, apart from the decoder.
    """
    params = jax.tree.map(np.float64, params)
    states = [params["embed"]["embedding"][token] for token in tokens]
    share = config.num_heads // config.num_kv_heads
    for number in range(config.num_layers):
        layer = jax.tree.map(lambda leaf, n=number: leaf[n], params["layers"])
        attention = layer["attention"]
        queries, keys, values = [], [], []
        for position, x in enumerate(states):
            x = normed(x, layer["attention_norm"]["scale"], config.rms_norm_eps)
            heads = [
                linear(x, attention[name]).reshape(-1, config.head_dim)
                for name in ("query", "key", "value")
            ]
            turn = [[rotated(h, position, config.rope_theta) for h in heads[0]]]
            turn.append([rotated(h, position, config.rope_theta) for h in heads[1]])
            queries.append(turn[0])
            keys.append(turn[1])
            values.append(heads[2])
        for position, x in enumerate(states):
            mixed = []
            for head in range(config.num_heads):
                seen = range(position + 1)
                scores = np.array(
                    [queries[position][head] @ keys[s][head // share] for s in seen]
                ) / np.sqrt(config.head_dim)
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                mixed.append(sum(weights[s] * values[s][head // share] for s in seen))
            x = x + linear(np.concatenate(mixed), attention["out"])
            y = normed(x, layer["mlp_norm"]["scale"], config.rms_norm_eps)
            gate = linear(y, layer["mlp"]["gate"])
            y = gate / (1 + np.exp(-gate)) * linear(y, layer["mlp"]["up"])
            states[position] = x + linear(y, layer["mlp"]["down"])
    head = (
        params["embed"]["embedding"].T
        if config.tie_embeddings
        else params["head"]["kernel"]
    )
    scale = params["final_norm"]["scale"]
    return np.stack([normed(x, scale, config.rms_norm_eps) @ head for x in states])


@pytest.mark.parametrize("name", CONFIGS)
def test_matches_float64_oracle(name):
    config = CONFIGS[name]
    params = random_params(config)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (2, 7))
    positions = np.tile(np.arange(7), (2, 1))
    logits = logits_of(config, params, tokens, positions, np.ones((2, 7), np.int32))
    assert logits.dtype == jnp.float32
    expected = [oracle(config, params, row) for row in tokens]
    assert_logits_close(logits, np.stack(expected))


@pytest.mark.parametrize("name", CONFIGS)
def test_padding_and_packing_do_not_change_a_sequence(name):
    config = CONFIGS[name]
    params = random_params(config)
    rng = np.random.default_rng(2)
    first, second = (rng.integers(0, config.vocab_size, n) for n in (3, 4))
    pad = rng.integers(0, config.vocab_size, 2)
    tokens = np.concatenate([pad, first, second, pad])[None]
    positions = np.concatenate([[5, 9], range(3), range(4), [0, 1]])[None]
    segment_ids = np.array([[0, 0, 1, 1, 1, 2, 2, 2, 2, 0, 0]])
    logits = logits_of(config, params, tokens, positions, segment_ids)[0]
    assert np.isfinite(logits).all()
    assert_logits_close(logits[2:5], oracle(config, params, first))
    assert_logits_close(logits[5:9], oracle(config, params, second))


def test_layers_that_come_apart_compute_the_same():
    params = random_params(LLAMA)  # Five layers: the others are scanned.
    tokens = np.random.default_rng(0).integers(0, 11, (2, 7), "int32")
    positions = np.broadcast_to(np.arange(7, dtype=np.int32), (2, 7))
    ones = np.ones_like(tokens)
    apart = params | {"layers": unstack(params["layers"])}
    run = functools.partial(jax.jit, static_argnums=0)(forward)
    expected, _ = run(LLAMA, params, tokens, positions, ones)
    hidden, _ = run(LLAMA, apart, tokens, positions, ones)
    np.testing.assert_allclose(hidden, expected, atol=1e-5)
    logits = [unembed(LLAMA, p, expected) for p in (params, apart)]
    np.testing.assert_array_equal(*logits)
    # And with a cache, in two pieces.
    cache, pieces = init_cache(LLAMA, 2, 9, np.float32, apart=True), []
    for part in (slice(0, 4), slice(4, 7)):
        inputs = (x[:, part] for x in (tokens, positions, ones))
        hidden, cache = run(LLAMA, apart, *inputs, cache)
        pieces.append(hidden)
    np.testing.assert_allclose(np.concatenate(pieces, 1), expected, atol=1e-5)
    assert len(cache.keys) == 5 and cache.length == 7


@pytest.mark.parametrize("name", CONFIGS)
def test_cached_decoding_equals_the_full_forward(name):
    config = CONFIGS[name]
    params = random_params(config)
    tokens = np.random.default_rng(3).integers(0, config.vocab_size, (2, 8))
    positions = np.array([[0, 0, 0, 1, 2, 3, 4, 5], list(range(8))])
    segment_ids = np.array([[0, 0, 1, 1, 1, 1, 1, 1], [1] * 8])
    full = logits_of(config, params, tokens, positions, segment_ids)

    @jax.jit
    def decode(params, tokens, positions, segment_ids):
        cache = init_cache(config, 2, 10, jnp.float32)
        pieces = []
        for start, stop in [(0, 4), (4, 5), (5, 8)]:
            part = np.s_[:, start:stop]
            inputs = tokens[part], positions[part], segment_ids[part]
            hidden, cache = forward(config, params, *inputs, cache)
            pieces.append(unembed(config, params, hidden))
        return jnp.concatenate(pieces, axis=1), cache.length

    cached, length = decode(params, tokens, positions, segment_ids)
    assert_logits_close(cached[0, 2:], full[0, 2:])
    assert_logits_close(cached[1], full[1])
    assert length == 8


def test_low_precision_parameters_still_give_float32_logits():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_params(QWEN2))
    tokens = np.arange(6)[None]
    ones = np.ones_like(tokens)
    inputs = (tokens, tokens, ones)
    hidden, _ = jax.eval_shape(functools.partial(forward, QWEN2), params, *inputs)
    assert hidden.dtype == jnp.bfloat16
    logits = logits_of(QWEN2, params, *inputs)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits[0], oracle(QWEN2, params, tokens[0]), atol=0.2)


def test_init_is_a_function_of_the_seed_and_scales_with_the_config():
    params = init_params(QWEN2, 7)
    again, other = init_params(QWEN2, 7), init_params(QWEN2, 7 + 2**32)
    jax.tree.map(np.testing.assert_array_equal, params, again)
    kernel = params["layers"]["mlp"]["gate"]["kernel"]
    assert np.std(kernel) == pytest.approx(QWEN2.initializer_range, rel=0.1)
    assert not np.allclose(kernel[0], kernel[1])
    assert not np.allclose(kernel, other["layers"]["mlp"]["gate"]["kernel"])
    assert "head" not in params and "head" in init_params(LLAMA, 0)


def test_seed_out_of_range_is_refused():
    np.testing.assert_array_equal(seed_words(3 * 2**32 + 5), [3, 5])
    for seed in (-1, 2**64):
        with pytest.raises(ValueError, match=f"seed={seed}"):
            seed_words(seed)


def test_sharded_rows_and_parameters_give_the_same_logits():
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), (jax.sharding.AxisType.Auto,) * 2)
    params = random_params(QWEN2)
    tokens = np.random.default_rng(4).integers(0, QWEN2.vocab_size, (8, 5))
    positions = np.tile(np.arange(5), (8, 1))
    inputs = (tokens, positions, np.ones_like(tokens))
    expected = logits_of(QWEN2, params, *inputs)

    def place(leaf, *axes):
        spec = jax.sharding.PartitionSpec(*axes)
        return jax.device_put(leaf, jax.sharding.NamedSharding(mesh, spec))

    sharded = jax.tree.map(
        lambda leaf: place(leaf, None, "fsdp") if leaf.ndim == 3 else place(leaf),
        params,
    )
    logits = logits_of(QWEN2, sharded, *(place(x, "data") for x in inputs))
    assert_logits_close(logits, np.asarray(expected))


def test_new_values_do_not_retrace():
    before = logits_of._cache_size()
    for seed in range(3):
        params = random_params(QWEN2, seed)
        tokens = np.full((3, 4), seed, np.int32)
        logits_of(QWEN2, params, tokens, tokens, tokens)
    assert logits_of._cache_size() == before + 1
