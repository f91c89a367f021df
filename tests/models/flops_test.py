"""Operations counted by formula against those counted by hand and by the compiler."""

import dataclasses

import jax
import pytest

from crbc_jax.models.config import load_config
from crbc_jax.models.decoder import forward, init_params, unembed
from crbc_jax.models.flops import forward_flops, step_flops

TINY = dataclasses.replace(
    load_config("preset:sokoban_tiny"),
    vocab_size=10,
    hidden_size=4,
    intermediate_size=6,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
)


def test_by_hand():
    # A token: query 4 x 4, key and value 4 x 2 each, out 4 x 4, three of 4 x 6.
    token = 16 + 8 + 8 + 16 + 3 * 24
    # Three tokens see 1 + 2 + 3; a score and a gather of 2 heads x 2 channels each.
    attention = 6 * (4 + 4)
    logits = 2 * 4 * 10  # Of two tokens.
    by_hand = 2 * (3 * token + attention + logits)
    assert forward_flops(TINY, rows=1, length=3, num_logits=2) == by_hand
    assert forward_flops(TINY, rows=5, length=3, num_logits=2) == 5 * by_hand


def test_two_layers_add_a_layer():
    layers = [
        forward_flops(
            dataclasses.replace(TINY, num_layers=count), rows=1, length=3, num_logits=0
        )
        for count in (1, 2)
    ]
    assert layers[1] == 2 * layers[0]


@pytest.mark.parametrize(
    "has_reference, recomputes, passes",
    [(False, False, 3), (True, False, 4), (False, True, 4), (True, True, 5)],
)
def test_passes_of_a_training_step(has_reference, recomputes, passes):
    sizes = {"rows": 2, "length": 8, "num_logits": 3}
    step = step_flops(TINY, **sizes, has_reference=has_reference, recomputes=recomputes)
    assert step == passes * forward_flops(TINY, **sizes)


def test_near_the_compilers_count():
    """Of two unrolled layers; XLA here computes all pairs of tokens, not half."""
    rows, length = 2, 64
    config = dataclasses.replace(
        load_config("preset:sokoban_tiny"), num_layers=2, vocab_size=512
    )
    tokens = jax.ShapeDtypeStruct((rows, length), "int32")

    def run(params, tokens, positions, segments):
        hidden, _ = forward(config, params, tokens, positions, segments)
        return unembed(config, params, hidden)

    params = jax.eval_shape(lambda: init_params(config, 0))
    compiled = jax.jit(run).lower(params, tokens, tokens, tokens).compile()
    ours = forward_flops(config, rows=rows, length=length, num_logits=length)
    unseen = length * (length - 1) // 2
    ours += (
        2 * rows * config.num_layers * unseen * 2 * config.num_heads * (config.head_dim)
    )
    assert ours == pytest.approx(compiled.cost_analysis()["flops"], rel=0.1)
