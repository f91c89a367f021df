"""Chunked, vocabulary-parallel log-probabilities against full logits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crbc_jax.learner import logprobs, losses, sharding
from crbc_jax.learner.logprobs import token_logprobs
from crbc_jax.models.decoder import init_params, unembed

ROWS, TOKENS, TEMPERATURE = 8, 5, 0.7


def make_inputs(decoder_config):
    random = np.random.default_rng(0)
    hidden = random.normal(size=(ROWS, TOKENS, decoder_config.hidden_size))
    token_ids = random.integers(decoder_config.vocab_size, size=(ROWS, TOKENS))
    weight = random.normal(size=(2, ROWS, TOKENS)).astype(np.float32)
    return hidden.astype(np.float32), token_ids.astype(np.int32), weight


def value_and_gradients(score, params, hidden, weight):
    """Log-probabilities and entropies, and gradients of a weighted sum of both."""

    @jax.jit
    def run(params, hidden):
        def total(params, hidden):
            results = score(params, hidden)
            return sum(
                jnp.sum(w * x) for w, x in zip(weight, results, strict=True)
            ), results

        return jax.grad(total, argnums=(0, 1), has_aux=True)(params, hidden)

    gradients, results = run(params, hidden)
    return jax.device_get((results, gradients))


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize(
    "num_devices, sizes",
    [
        (1, {}),
        (8, {"data": 8}),
        (8, {"data": 2, "fsdp": 4}),
        (8, {"data": 1, "fsdp": 2, "tensor": 4}),
    ],
    ids=str,
)
@pytest.mark.parametrize("max_logits", [2**26, 200])  # The latter: eight tokens at once
def test_equal_to_full_logits(
    is_tied, num_devices, sizes, max_logits, decoder_config, monkeypatch
):
    monkeypatch.setattr(logprobs, "MAX_LOGITS", max_logits)
    config = dataclasses.replace(decoder_config, tie_embeddings=is_tied)
    assert config.vocab_size % 4 == 0  # So that tensor=4 splits the vocabulary.
    mesh = sharding.make_mesh(**sizes, devices=jax.devices()[:num_devices])
    params = init_params(config, 0)
    placed = jax.device_put(params, sharding.tree_shardings(params, mesh))
    hidden, token_ids, weight = make_inputs(config)
    results, gradients = value_and_gradients(
        lambda params, hidden: token_logprobs(
            config, params, hidden, token_ids, TEMPERATURE, mesh
        ),
        placed,
        hidden,
        weight,
    )
    expected = value_and_gradients(
        lambda params, hidden: losses.logprobs_and_entropy(
            unembed(config, params, hidden), token_ids, TEMPERATURE
        ),
        params,
        hidden,
        weight,
    )
    # Sums of at most 64 float32 terms of size one, in another order.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        (results, gradients),
        expected,
    )
    assert np.all(results[0] <= 0)


def test_never_holds_all_logits(decoder_config, monkeypatch):
    """The compiled gradient needs less memory than the logits would take."""
    config = dataclasses.replace(decoder_config, vocab_size=4096)
    mesh = sharding.make_mesh(devices=jax.devices()[:1])
    monkeypatch.setattr(logprobs, "MAX_LOGITS", 2**17)
    shape = (16, 64)

    def loss(params, hidden, token_ids):
        chosen, entropy = token_logprobs(config, params, hidden, token_ids, 1.0, mesh)
        return jnp.sum(chosen + entropy)

    compiled = (
        jax.jit(jax.grad(loss, argnums=(0, 1)))
        .lower(
            jax.eval_shape(lambda: init_params(config, 0)),
            jax.ShapeDtypeStruct((*shape, config.hidden_size), jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.int32),
        )
        .compile()
    )
    logits_bytes = 4 * 16 * 64 * 4096
    assert compiled.memory_analysis().temp_size_in_bytes < logits_bytes / 2
