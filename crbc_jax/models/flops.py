"""Decoder and token counts -> floating-point operations, by counting its products.

A compiler's own count goes once through a loop's body, however often it runs; here the
layers and chunks count as often as they are computed.
"""

from crbc_jax.models.config import DecoderConfig


def forward_flops(
    config: DecoderConfig, *, rows: int, length: int, num_logits: int
) -> int:
    """Operations of one pass over causal rows; a multiplication and an addition are 2.

    Products of matrices alone: norms, rotations and softmax, which are left out, are
    below a percent in models of 1B parameters and more.

    Args:
        rows: sequences, which fill all their slots.
        length: slots of each.
        num_logits: tokens of each that are turned into logits.
    """
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    attention = config.hidden_size * (2 * queries + 2 * keys)
    mlp = 3 * config.hidden_size * config.intermediate_size
    seen = length * (length + 1) // 2  # By all tokens of a row, themselves included.
    layer = length * (attention + mlp) + seen * 2 * queries
    head = num_logits * config.hidden_size * config.vocab_size
    return 2 * rows * (config.num_layers * layer + head)


def step_flops(
    config: DecoderConfig,
    *,
    rows: int,
    length: int,
    num_logits: int,
    has_reference: bool,
    recomputes: bool,
) -> int:
    """Operations of a training step: forward, backward (twice that), and what it asks.

    Args:
        rows, length, num_logits: as `forward_flops`.
        has_reference: the frozen parameters score the rows, too.
        recomputes: the forward pass runs again for the gradient (remat "full").
    """
    passes = 3 + has_reference + recomputes
    return passes * forward_flops(
        config, rows=rows, length=length, num_logits=num_logits
    )
