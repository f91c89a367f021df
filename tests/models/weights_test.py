"""Hugging Face directories in and out: values, sharding, and what must be refused.

tests/golden/hf_* are random models that transformers 5.19 wrote, with its logits.
"""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from crbc_jax.learner import sharding
from crbc_jax.models import weights
from crbc_jax.models.config import load_config
from crbc_jax.models.decoder import abstract_params, forward, init_params, unembed
from crbc_jax.types import UserError

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
QWEN2 = GOLDEN / "hf_qwen2"  # Tied, biases, one bfloat16 file.
LLAMA3 = GOLDEN / "hf_llama3"  # Untied, scaled rotary, six float32 files.
DTYPES = {QWEN2: "bfloat16", LLAMA3: "float32"}
BOTH = pytest.mark.parametrize("folder", [QWEN2, LLAMA3], ids=lambda path: path.name)


def load(folder, **options):
    config = load_config(str(folder))
    return config, weights.import_params(str(folder), config, **options)


def tensors(folder):
    return {
        name: tensor
        for path in folder.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def rewrite(folder, target, change):
    """Copies `folder` with one file of changed tensors."""
    shutil.copytree(
        folder, target, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json")
    )
    save_file(change(tensors(folder)), target / "model.safetensors")
    return target


@BOTH
def test_logits_equal_those_of_transformers(folder):
    config, params = load(folder)
    expected = np.load(folder / "expected.npz")
    tokens = expected["tokens"]
    hidden, _ = forward(
        config, params, tokens, expected["positions"], np.ones_like(tokens)
    )
    logits = unembed(config, params, hidden)
    # Both compute in float32, in another order: sums of some 50 terms, logits to 60.
    np.testing.assert_allclose(logits, expected["logits"], atol=2e-4)


@BOTH
def test_export_is_equal_to_the_bit(folder, tmp_path):
    config, params = load(folder, dtype=DTYPES[folder])
    weights.export_model(params, config, str(folder), tmp_path / "out")
    assert load_config(str(tmp_path / "out")) == config
    there, again = tensors(folder), tensors(tmp_path / "out")
    assert set(there) == set(again)
    for name, tensor in there.items():
        assert tensor.dtype == again[name].dtype, name
        np.testing.assert_array_equal(tensor, again[name], err_msg=name)


def test_large_exports_are_split_and_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "_MAX_FILE_BYTES", 10_000)
    config = load_config("preset:sokoban_tiny")
    params = init_params(config, 3)
    weights.export_model(params, config, "preset:sokoban_tiny", tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    again = weights.import_params(str(tmp_path / "out"), config)
    jax.tree.map(np.testing.assert_array_equal, again, params)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).is_file()


@BOTH
def test_each_device_gets_its_part(folder):
    mesh = sharding.make_mesh(data=1, fsdp=2, tensor=2, devices=jax.devices()[:4])
    config, whole = load(folder)
    where = sharding.tree_shardings(abstract_params(config), mesh)
    _, parts = load(folder, shardings=where)
    jax.tree.map(np.testing.assert_array_equal, parts, whole)
    kernel = parts["layers"]["mlp"]["gate"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (2, 16, 24)


@pytest.mark.parametrize(
    "change,words",
    [
        (lambda t: {k: v for k, v in t.items() if "1.mlp.up" not in k}, "lack.*mlp.up"),
        (lambda t: t | {"model.extra": t["model.norm.weight"]}, "unknown.*model.extra"),
        (
            lambda t: t | {"model.norm.weight": t["model.norm.weight"][:16]},
            r"model.norm.weight has shape \[16\]",
        ),
        (
            lambda t: {k: v.view(np.int16) if v.ndim else v for k, v in t.items()},
            "stored as I16.*quantised",
        ),
        (
            lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"][::-1]},
            "ties the head",
        ),
    ],
    ids=["missing", "unknown", "shape", "quantised", "head"],
)
def test_wrong_tensors_are_refused(change, words, tmp_path):
    with pytest.raises(UserError, match=words):
        load(rewrite(QWEN2, tmp_path / "model", change))


def test_a_copied_head_and_old_constants_are_welcome(tmp_path):
    def change(there):
        return there | {
            "lm_head.weight": there["model.embed_tokens.weight"],
            "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
        }

    _, params = load(rewrite(QWEN2, tmp_path / "model", change))
    jax.tree.map(np.testing.assert_array_equal, params, load(QWEN2)[1])


def test_damaged_and_absent_files_are_refused(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(LLAMA3, folder)
    part = folder / "model-00002-of-00006.safetensors"
    part.write_bytes(part.read_bytes()[:-100])
    with pytest.raises(UserError, match="00002-of-00006.*cannot be read"):
        load(folder)
    part.unlink()
    with pytest.raises(UserError, match="names.*00002-of-00006.*not there"):
        load(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be read"):
        load(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(UserError, match="holds no model.safetensors.*fresh"):
        load(folder)


def test_export_refuses_what_would_be_lost_or_wrong(tmp_path):
    config, params = load(QWEN2)
    with pytest.raises(UserError, match="exists"):
        weights.export_model(params, config, str(QWEN2), tmp_path)
    with pytest.raises(UserError, match="shape"):
        weights.export_model(params, config, str(LLAMA3), tmp_path / "out")


def test_a_failed_export_leaves_nothing(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    config, params = load(QWEN2)
    monkeypatch.setattr(weights, "save_file", fail)
    with pytest.raises(OSError, match="No space"):
        weights.export_model(params, config, str(QWEN2), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_the_scaled_rotary_needs_all_its_numbers(tmp_path):
    shutil.copytree(LLAMA3, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    fields = json.loads(path.read_text())
    del fields["rope_parameters"]["low_freq_factor"]
    path.write_text(json.dumps(fields))
    with pytest.raises(UserError, match="lacks 'low_freq_factor'"):
        load_config(str(tmp_path / "model"))
