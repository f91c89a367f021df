"""Low-rank adapters of a decoder (LoRA, Hu et al., arXiv 2106.09685).

An adapted kernel W [in, out] acts as W + (alpha / rank) A B. A starts at random and B
at 0, so that training starts at the model itself. In the parameters, lora_a [layers,
in, rank] and lora_b [layers, rank, out] stand beside the kernel that they add to.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from crbc_jax.models.config import LORA_TARGETS, DecoderConfig, LoraConfig
from crbc_jax.models.decoder import abstract_params, seed_words
from crbc_jax.types import UserError

LEAVES = ("lora_a", "lora_b")


def with_adapters(config: DecoderConfig, settings: Any) -> DecoderConfig:
    """Adds the adapters that `settings`, a config.model, asks for, if any.

    Raises:
        UserError: if one of its lora_targets is none of a decoder's products.
    """
    if not settings.lora_rank:
        return config
    targets = tuple(name.strip() for name in settings.lora_targets.split(","))
    if unknown := sorted(set(targets) - set(LORA_TARGETS)):
        raise UserError(
            f"config.model.lora_targets={settings.lora_targets!r}: {unknown} are not "
            f"known; some of {list(LORA_TARGETS)}, with commas between"
        )
    lora = LoraConfig(settings.lora_rank, settings.lora_alpha, targets)
    return dataclasses.replace(config, lora=lora)


def without_adapters(config: DecoderConfig) -> DecoderConfig:
    """The shape of the model itself, and of what `merge` returns."""
    return dataclasses.replace(config, lora=None)


@functools.partial(jax.jit, static_argnames="config")
def merge(config: DecoderConfig, params: dict[str, Any]) -> dict[str, Any]:
    """Parameters of the plain model with the same output; sums in float32.

    Args:
        config: with adapters.
        params: of that shape.
    """

    def fold(node):
        if not isinstance(node, dict):
            return node
        node = {name: fold(child) for name, child in node.items()}
        if LEAVES[0] in node:
            a, b = (node.pop(name).astype(jnp.float32) for name in LEAVES)
            product = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
            kernel = node["kernel"].astype(jnp.float32) + config.lora.scale * product
            node["kernel"] = kernel.astype(node["kernel"].dtype)
        return node

    return fold(params)


def add_adapters(
    config: DecoderConfig, params: dict[str, Any], seed: int
) -> dict[str, Any]:
    """Returns the parameters of a plain model with fresh adapters beside them.

    Args:
        config: with adapters.
        params: without.
        seed: below 2**64; the adapters are a function of it and of `config`.
    """
    return _join(params, _draw(config, seed_words(seed)))


@functools.partial(jax.jit, static_argnames="config")
def _draw(config, words):
    """Tree of the adapters alone: A as any kernel starts, B at 0."""
    key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), 1)

    def draw(node, key):
        drawn = {}
        for number, (name, child) in enumerate(sorted(node.items())):
            if isinstance(child, dict):
                drawn[name] = draw(child, jax.random.fold_in(key, number))
            elif name == "lora_a":
                normal = jax.random.normal(key, child.shape)
                drawn[name] = config.initializer_range * normal
            elif name == "lora_b":
                drawn[name] = jnp.zeros(child.shape)
        return drawn

    return draw(abstract_params(config), key)


def _join(params, adapters):
    joined = dict(params)
    for name, child in adapters.items():
        is_inner = isinstance(child, dict)
        joined[name] = _join(params[name], child) if is_inner else child
    return joined
