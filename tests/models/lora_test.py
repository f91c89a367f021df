import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from crbc_jax.config import default_config
from crbc_jax.models import lora, weights
from crbc_jax.models.config import LORA_TARGETS, LoraConfig, load_config
from crbc_jax.models.decoder import forward, init_params, unembed
from crbc_jax.types import UserError

LLAMA3 = pathlib.Path(__file__).parent.parent / "golden" / "hf_llama3"
PLAIN = load_config(str(LLAMA3))
ADAPTED = dataclasses.replace(PLAIN, lora=LoraConfig(4, 6.0, ("query", "out", "down")))


def trained():
    """Parameters with adapters as training leaves them: B is not 0."""
    params = weights.import_params(str(LLAMA3), PLAIN)
    params = lora.add_adapters(ADAPTED, params, seed=5)
    random = np.random.default_rng(0)

    def fill(path, leaf):
        if path[-1].key in lora.LEAVES:
            return np.float32(random.normal(0, 0.3, leaf.shape))
        return np.asarray(leaf)

    return jax.tree_util.tree_map_with_path(fill, params)


def logits(config, params):
    tokens = np.arange(12, dtype=np.int32)[None]
    hidden, _ = forward(config, params, tokens, tokens, np.ones_like(tokens))
    return np.asarray(unembed(config, params, hidden))


def test_fresh_adapters_change_nothing_and_depend_on_the_seed():
    params = weights.import_params(str(LLAMA3), PLAIN)
    once, again, other = (lora.add_adapters(ADAPTED, params, s) for s in (1, 1, 2))
    # The adapters add exact zeros; some compilers then sum the rest in another order.
    before = logits(PLAIN, params)
    np.testing.assert_allclose(logits(ADAPTED, once), before, atol=1e-4)
    jax.tree.map(np.testing.assert_array_equal, once, again)
    a, b = (p["layers"]["attention"]["query"]["lora_a"] for p in (once, other))
    assert not np.array_equal(a, b)
    assert 0.6 < np.std(a) / PLAIN.initializer_range < 1.4  # Of 256 draws.
    assert jax.tree.structure(once) == jax.tree.structure(init_params(ADAPTED, 0))
    assert set(once["layers"]["mlp"]["up"]) == {"kernel"}


def test_merged_parameters_give_the_same_output():
    params = trained()
    merged = lora.merge(ADAPTED, params)
    for name, block in (("query", "attention"), ("down", "mlp")):
        leaf = {k: np.float64(v) for k, v in params["layers"][block][name].items()}
        expected = leaf["kernel"] + 6.0 / 4 * leaf["lora_a"] @ leaf["lora_b"]
        actual = merged["layers"][block][name]["kernel"]
        np.testing.assert_allclose(actual, expected, atol=1e-6)
    assert jax.tree.structure(merged) == jax.tree.structure(init_params(PLAIN, 0))
    both = logits(ADAPTED, params), logits(lora.without_adapters(ADAPTED), merged)
    # Rounding in another order, of logits to 60; without adapters it is another model.
    np.testing.assert_allclose(*both, atol=2e-4)
    before = logits(PLAIN, weights.import_params(str(LLAMA3), PLAIN))
    assert np.abs(both[0] - before).max() > 1


def test_adapters_are_written_as_peft_reads_them(tmp_path):
    params = trained()
    weights.export_adapters(params, ADAPTED, "some/model", tmp_path / "out")
    fields = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert fields["target_modules"] == ["q_proj", "o_proj", "down_proj"]
    assert (fields["r"], fields["lora_alpha"]) == (4, 6.0)
    there = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert len(there) == 2 * 3 * PLAIN.num_layers
    ours = params["layers"]["mlp"]["down"]
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_{}.weight"
    np.testing.assert_array_equal(there[name.format("A")], ours["lora_a"][1].T)
    np.testing.assert_array_equal(there[name.format("B")], ours["lora_b"][1].T)
    with pytest.raises(UserError, match="exists"):
        weights.export_adapters(params, ADAPTED, "some/model", tmp_path / "out")
    plain = weights.import_params(str(LLAMA3), PLAIN)
    with pytest.raises(UserError, match="no adapters"):
        weights.export_adapters(plain, PLAIN, "some/model", tmp_path / "more")


def test_settings_say_which_products_are_adapted():
    settings = default_config().model
    assert lora.with_adapters(PLAIN, settings) == PLAIN
    settings.lora_rank = 8
    assert lora.with_adapters(PLAIN, settings).lora.targets == LORA_TARGETS
    settings.lora_targets = "query, value"
    assert lora.with_adapters(PLAIN, settings).lora.targets == ("query", "value")
    settings.lora_targets = "query,q_proj"
    with pytest.raises(UserError, match=r"\['q_proj'\] are not known"):
        lora.with_adapters(PLAIN, settings)
