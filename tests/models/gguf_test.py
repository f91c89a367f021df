"""GGUF files become Hugging Face directories: values, tokenizer, and a real model."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from crbc_jax.models import gguf
from crbc_jax.models.decoder import abstract_params, forward, unembed
from crbc_jax.models.pretrained import load_model
from crbc_jax.models.weights import import_params
from crbc_jax.rollout.prompts import stop_ids
from crbc_jax.rollout.templates import PROMPTS
from crbc_jax.types import UserError

ROOT = pathlib.Path(__file__).parent.parent.parent
GOLDEN = ROOT / "tests" / "golden" / "smollm2_greedy.json"
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 16, 24, 4, 2, 4, 2
TOKENS = ["<end>", "<start>", *"abc0", "ab"]


def interleaved(tensor, num_heads):
    """llama.cpp's order of rotary channels, of the two halves of Hugging Face."""
    halves = tensor.reshape(num_heads, 2, -1, tensor.shape[-1])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


@pytest.fixture
def tensors():
    """Random weights by their Hugging Face names."""
    random = np.random.default_rng(0)
    shapes = {"model.embed_tokens": (len(TOKENS), HIDDEN), "model.norm": (HIDDEN,)}
    for layer in range(LAYERS):
        for name, shape in {
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }.items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    return {
        f"{name}.weight": np.float32(random.normal(size=shape))
        for name, shape in shapes.items()
    }


@pytest.fixture
def write(tensors, tmp_path):
    """Writes them as a GGUF file, with any field changed."""
    library = pytest.importorskip("gguf")
    ours = {theirs: name for name, theirs in gguf._LAYER_MODULES.items()}

    def write(architecture="llama", pre="smollm"):
        path = tmp_path / "model.gguf"
        writer = library.GGUFWriter(path, architecture)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(INNER)
        writer.add_block_count(LAYERS)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_rope_dimension_count(HEAD_DIM)
        writer.add_rope_freq_base(500.0)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_context_length(64)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(TOKENS)
        writer.add_token_types([3, 3, 1, 1, 1, 1, 1])
        writer.add_token_merges(["a b"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(0)
        writer.add_chat_template("<start>{{ messages[0]['content'] }}")
        for name, tensor in tensors.items():
            parts = name.split(".")
            if parts[1] == "layers":
                module = ours[".".join(parts[3:-1])]
                if module == "attn_q":
                    tensor = interleaved(tensor, HEADS)
                elif module == "attn_k":
                    tensor = interleaved(tensor, KV_HEADS)
                writer.add_tensor(f"blk.{parts[2]}.{module}.weight", tensor)
            else:
                module = {"embed_tokens": "token_embd", "norm": "output_norm"}[parts[1]]
                writer.add_tensor(f"{module}.weight", tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def test_every_tensor_and_field_comes_through(write, tensors, tmp_path):
    from safetensors.numpy import load_file

    directory = tmp_path / "hf"
    directory.mkdir()
    gguf.convert(write(), directory)
    there = load_file(directory / "model.safetensors")
    assert there.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(there[name], tensor, err_msg=name)

    config, tokenizer = load_model(str(directory))
    assert config.rope_theta == 500.0 and config.rms_norm_eps == 1e-5
    assert (config.num_kv_heads, config.head_dim) == (KV_HEADS, HEAD_DIM)
    assert config.tie_embeddings and config.max_positions == 64
    assert tokenizer.encode("abc00").tolist() == [6, 4, 5, 5]  # Digits stay apart.
    assert tokenizer.in_chat("ab") == "<start>ab"
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 0, None)
    import_params(str(directory), config)


@pytest.mark.parametrize(
    "change,words",
    [
        ({"architecture": "gemma"}, "architecture='gemma' is not supported"),
        ({"pre": "llama-bpe"}, "pre='llama-bpe' is not supported"),
    ],
)
def test_other_kinds_of_file_are_refused(write, tmp_path, change, words):
    with pytest.raises(UserError, match=words):
        gguf.convert(write(**change), tmp_path)


def test_a_file_that_is_none_is_refused(tmp_path):
    pytest.importorskip("gguf")
    (tmp_path / "x.gguf").write_bytes(b"not one")
    with pytest.raises(UserError, match="is no GGUF file"):
        gguf.convert(tmp_path / "x.gguf", tmp_path)


@pytest.mark.parametrize(
    "arguments,status,words",
    [
        (["Qwen/Qwen2.5-7B"], 0, "hf download Qwen/Qwen2.5-7B --local-dir models/Qw"),
        (["smolm"], 1, "'smolm' is not known"),
        ([], 1, "name one model"),
        (["smollm2", "more"], 1, "not a flag: 'more'"),
        (["smollm2", "--directory=tests"], 1, "exists; choose a new one"),
    ],
)
def test_the_script_says_how_to_get_a_model(arguments, status, words):
    result = subprocess.run(
        [sys.executable, "experiments/get_model.py", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == status
    assert words in result.stdout + result.stderr


@pytest.mark.skipif(
    "CRBC_SMOLLM2" not in os.environ,
    reason="CRBC_SMOLLM2 does not name what get_model.py smollm2 makes",
)
def test_smollm2_speaks_as_in_transformers():
    """The golden file is of transformers 5.19 and torch, on the same directory."""
    config, tokenizer = load_model(os.environ["CRBC_SMOLLM2"])
    params = import_params(os.environ["CRBC_SMOLLM2"], config)
    assert abstract_params(config)["embed"]["embedding"].shape == (49152, 576)
    assert stop_ids(PROMPTS["sokoban"], tokenizer) == (2,)
    for golden in json.loads(GOLDEN.read_text()):
        prompt = tokenizer.encode(tokenizer.in_chat(golden["message"]))
        assert prompt.tolist() == golden["prompt_ids"]
        reply = golden["reply_ids"]
        tokens = np.array([[*golden["prompt_ids"], *reply]], np.int32)
        positions = np.arange(tokens.shape[1], dtype=np.int32)[None]
        hidden, _ = forward(config, params, tokens, positions, np.ones_like(tokens))
        logits = np.float64(unembed(config, params, hidden))[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == reply
        chosen = logits[np.arange(len(reply)), reply]
        logprobs = chosen - np.log(np.exp(logits).sum(-1))
        np.testing.assert_allclose(logprobs, golden["logprobs"], atol=1e-4)
