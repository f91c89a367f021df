import dataclasses
import json

import jax
import pytest

from crbc_jax.models.config import count_params, load_config, parse_config
from crbc_jax.models.decoder import init_params
from crbc_jax.models.pretrained import load_model
from crbc_jax.types import UserError

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
}


def test_published_shapes_have_their_published_sizes():
    # Qwen2.5-0.5B and SmolLM2-135M, as counted by their authors' checkpoints.
    assert count_params(parse_config(QWEN2, "qwen2")) == 494_032_768
    assert count_params(parse_config(LLAMA, "llama")) == 134_515_008


def test_head_dim_biases_and_theta_follow_the_family():
    qwen2, llama = parse_config(QWEN2, "qwen2"), parse_config(LLAMA, "llama")
    assert (qwen2.head_dim, llama.head_dim) == (64, 64)
    assert (qwen2.qkv_bias, llama.qkv_bias) == (True, False)
    assert (qwen2.out_bias, llama.out_bias) == (False, False)
    biased = parse_config({**LLAMA, "attention_bias": True}, "llama")
    assert (biased.qkv_bias, biased.out_bias) == (True, True)
    assert qwen2.rope_theta == 1e6
    assert llama.rope_theta == 1e5


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
def test_rope_theta_is_read_where_newer_files_have_it(place):
    fields = {k: v for k, v in QWEN2.items() if k != "rope_theta"}
    fields[place] = {"rope_theta": 5e5, "rope_type": "default"}
    assert parse_config(fields, "test").rope_theta == 5e5


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "model_type='mamba'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"layer_types": ["sliding_attention"] * 24}, "layer_types"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"head_dim": 33}, "head_dim=33"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"hidden_size": "896"}, "hidden_size='896'"),
    ],
)
def test_what_is_not_supported_is_named(change, named):
    with pytest.raises(UserError, match="some/config.json") as error:
        parse_config({**QWEN2, **change}, "some/config.json")
    assert named in str(error.value)


def test_missing_field_is_named():
    fields = {k: v for k, v in QWEN2.items() if k != "vocab_size"}
    with pytest.raises(UserError, match="vocab_size"):
        parse_config(fields, "test")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_count_is_that_of_the_parameters(family, tied):
    config = dataclasses.replace(
        load_config("preset:sokoban_tiny"), tie_embeddings=tied
    )
    if family == "llama":
        config = dataclasses.replace(config, out_bias=True, mlp_bias=True)
    params = jax.eval_shape(lambda: init_params(config, 0))
    assert count_params(config) == sum(leaf.size for leaf in jax.tree.leaves(params))


def test_preset_is_tiny_and_servable():
    config, tokenizer = load_model("preset:sokoban_tiny")
    assert 100_000 < count_params(config) < 200_000
    assert config.head_dim >= 32  # vLLM's CPU backend has no smaller kernel.
    assert config.vocab_size == tokenizer.vocab_size


@pytest.mark.parametrize("directory", ["preset:none", "no/such/folder"])
def test_missing_directory_names_the_field_and_what_exists(directory):
    with pytest.raises(UserError, match="config.model.directory") as error:
        load_model(directory)
    assert directory in str(error.value)
    assert "preset:sokoban_tiny" in str(error.value)


def test_incomplete_directory_says_what_is_missing(tmp_path):
    with pytest.raises(UserError, match="no config.json"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(QWEN2))
    with pytest.raises(UserError, match="tokenizer.json is missing"):
        load_model(str(tmp_path))
