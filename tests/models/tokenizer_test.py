import pathlib
import shutil

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from crbc_jax import models
from crbc_jax.models.pretrained import load_model
from crbc_jax.models.tokenizer import Tokenizer, load_tokenizer
from crbc_jax.types import UserError

SOKOBAN = load_tokenizer("preset:sokoban_tiny")
UNKNOWN = SOKOBAN.id_of("<unk>")


def test_a_level_and_its_reply_become_one_token_a_cell_and_word():
    text = "<bos>__P_\n_XO√<action>up</action><eos>"
    ids = SOKOBAN.encode(text)
    assert ids.dtype == np.int32
    assert [SOKOBAN.decode([i]) for i in ids.tolist()] == [
        "<bos>",
        *"__P_\n_XO√",
        "<action>",
        "up",
        "</action>",
        "<eos>",
    ]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, SOKOBAN.vocab_size - 1).filter(lambda i: i != UNKNOWN)))
def test_every_sequence_of_ids_survives_text(ids):
    text = SOKOBAN.decode(ids)
    assert text == "".join(SOKOBAN.decode([i]) for i in ids)
    assert SOKOBAN.encode(text).tolist() == ids


@pytest.mark.parametrize(("text", "unknown"), [("_a_", "'a'"), ("<unk>", "<unk>")])
def test_unknown_text_is_an_error_that_names_it(text, unknown):
    with pytest.raises(ValueError, match="not in the vocabulary") as error:
        SOKOBAN.encode(text)
    assert unknown in str(error.value)
    with pytest.raises(ValueError, match="'sideways'"):
        SOKOBAN.id_of("sideways")


def test_special_tokens():
    assert SOKOBAN.decode([SOKOBAN.bos_id, SOKOBAN.eos_id, SOKOBAN.pad_id]) == (
        "<bos><eos><pad>"
    )
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}))
    bare = Tokenizer(backend, {})
    assert (bare.bos_id, bare.eos_id, bare.pad_id) == (None, None, None)


def test_a_message_is_put_into_the_models_own_chat(tmp_path):
    text = load_tokenizer("preset:text_tiny")
    expected = "<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    assert text.in_chat("Go on.") == expected
    assert SOKOBAN.in_chat("Go on.") == "Go on."  # It has no template.

    # In a file of its own, as transformers 5 writes it, and with a system message.
    preset = pathlib.Path(models.__file__).parent / "presets/sokoban_tiny"
    shutil.copytree(preset, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(
        "<bos>Help.{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}"
        "{% endfor %}{% if add_generation_prompt %}[reply]{% endif %}"
    )
    assert load_tokenizer(str(tmp_path)).in_chat(" hi\n") == (
        "<bos>Help.[user]hi[reply]"
    )


def test_files_of_two_models_are_refused(tmp_path):
    preset = pathlib.Path(models.__file__).parent / "presets/sokoban_tiny"
    shutil.copytree(preset, tmp_path, dirs_exist_ok=True)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"vocab_size": 24', '"vocab_size": 8'))
    with pytest.raises(UserError, match="not of one model"):
        load_model(str(tmp_path))
