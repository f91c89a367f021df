"""A GGUF file of a Llama model -> a Hugging Face directory, without torch.

The weights become float32: what a quantised file stores, written out. Needs the
package `gguf` (extra [gguf]).
"""

import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

from crbc_jax.types import UserError

_MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL = 3  # Kind of a token that stands for no text.


def convert(source: pathlib.Path, directory: pathlib.Path) -> None:
    """Writes `source` as a Hugging Face directory: config, weights, tokenizer, chat.

    Args:
        source: a GGUF file of a Llama model with SmolLM's tokenizer.
        directory: an empty folder.

    Raises:
        UserError: if the package gguf is missing, or the file is of another kind.
    """
    try:
        import gguf
    except ModuleNotFoundError:
        raise UserError(
            'the package gguf is missing; pip install -e ".[gguf]"'
        ) from None
    try:
        reader = gguf.GGUFReader(source)
    except (OSError, ValueError) as error:
        raise UserError(f"{source} is no GGUF file ({error})") from error

    def value(name: str, default: Any = None) -> Any:
        field = reader.fields.get(name)
        return default if field is None else field.contents()

    for field, known in (
        ("general.architecture", "llama"),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "smollm"),
    ):
        if value(field) != known:
            raise UserError(
                f"{source}: {field}={value(field)!r} is not supported; known: {known!r}"
            )
    config = _config(value)
    tensors = dict(_tensors(reader, gguf.dequantize, config))
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    _write_json(directory / "config.json", config)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(value, directory)


def _config(value: Callable) -> dict[str, Any]:
    hidden, heads = value("llama.embedding_length"), value("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(value("tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": value("llama.feed_forward_length"),
        "num_hidden_layers": value("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("llama.attention.head_count_kv", heads),
        "head_dim": value("llama.rope.dimension_count", hidden // heads),
        "hidden_act": "silu",
        "max_position_embeddings": value("llama.context_length"),
        # Stored as float32: without the digits that this adds to 1e-5.
        "rms_norm_eps": _short(value("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": value("llama.rope.freq_base", 10000.0),
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
        "pad_token_id": value("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }


def _tensors(reader, dequantize, config) -> Iterator[tuple[str, np.ndarray]]:
    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    for stored in reader.tensors:
        module, _, kind = stored.name.rpartition(".")
        tensor = np.float32(dequantize(stored.data, stored.tensor_type))
        if module in _MODULES:
            yield f"{_MODULES[module]}.{kind}", tensor
            continue
        _, _, layer_and_module = module.partition("blk.")
        layer, _, module = layer_and_module.partition(".")
        if module not in _LAYER_MODULES:
            raise UserError(f"the tensor {stored.name} is not of a known Llama model")
        if module in heads:
            tensor = _halves(tensor, heads[module])
        yield f"model.layers.{layer}.{_LAYER_MODULES[module]}.{kind}", tensor


def _halves(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """Pairs of rotary channels: theirs lie side by side, ours half a head apart."""
    pairs = tensor.reshape(num_heads, -1, 2, tensor.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(tensor.shape)


def _write_tokenizer(value: Callable, directory: pathlib.Path) -> None:
    tokens = value("tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in value("tokenizer.ggml.merges")]
    vocab = {token: number for number, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    kinds = value("tokenizer.ggml.token_type")
    backend.add_special_tokens(
        [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    )
    backend.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": value("llama.context_length"),
        "chat_template": value("tokenizer.chat_template"),
    }
    for name, field in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        number = value(f"tokenizer.ggml.{field}_token_id")
        if number is not None:
            settings[f"{name}_token"] = tokens[number]
    _write_json(directory / "tokenizer_config.json", settings)
    eos = value("tokenizer.ggml.eos_token_id")
    _write_json(directory / "generation_config.json", {"eos_token_id": eos})


def _short(number: float) -> float:
    return float(str(np.float32(number)))


def _write_json(path: pathlib.Path, fields: dict[str, Any]) -> None:
    known = {name: value for name, value in fields.items() if value is not None}
    path.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
