import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from crbc_jax import envs
from crbc_jax.models.tokenizer import Tokenizer, load_tokenizer
from crbc_jax.rollout.actions import parse_action
from crbc_jax.rollout.prompts import build_prompt, encode_reply, stop_ids
from crbc_jax.rollout.templates import PROMPTS
from crbc_jax.rollout.templates.base import Record, Scene
from crbc_jax.types import INVALID_ACTION, UserError

BOARD = "######\n#__O_#\n#__X_#\n#_P__#\n####_#\n######"
COMPACT, WORDS = PROMPTS["sokoban_compact"], PROMPTS["sokoban"]


@pytest.fixture(scope="module")
def tiny():
    return load_tokenizer("preset:sokoban_tiny")


def byte_tokenizer(chat: bool, knows_end: bool = True) -> Tokenizer:
    """One token a byte, like a language model's last resort; with or without ChatML."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"] if chat else ["<eos>"])
    end = "<|im_end|>" if chat else "<eos>"
    return Tokenizer(
        backend, {"eos": end} if knows_end else {}, chatml if chat else None
    )


def chatml(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def build(template, tokenizer, records=(), history_length=2, max_tokens=4096):
    return build_prompt(
        template,
        tokenizer,
        list(records),
        BOARD,
        history_length=history_length,
        max_tokens=max_tokens,
        admissible_actions=["up", "down", "left", "right"],
    )


def test_compact_prompt_is_the_cells_within_the_walls(tiny):
    prompt = build(COMPACT, tiny)
    assert tiny.decode(prompt.ids) == "__O___X__P__###_"
    assert (prompt.ids.dtype, len(prompt.ids), prompt.num_dropped) == (np.int32, 16, 0)


def test_compact_prompt_with_reply_is_19_tokens_and_reads_back(tiny):
    reply = encode_reply(COMPACT, tiny, "up")
    assert tiny.decode(reply) == "<action>up</action>"
    assert len(build(COMPACT, tiny).ids) + len(reply) == 19
    assert reply[-1] in stop_ids(COMPACT, tiny)
    assert parse_action(tiny.decode(reply)) == ("up", "ok")


def test_compact_prompt_has_words_for_every_board_and_action(tiny):
    """No action that a reply can ask for, however odd, is a word that is missing."""
    actions = ["up", INVALID_ACTION, "p#_", "up up", "√", "<pad>", "漢" * 100]
    for task_id in envs.tasks("sokoban", "train", count=20).ids:
        for step in envs.expert("sokoban", task_id):
            for action in actions:
                records = [Record(step.observation, action)]
                ids = build(COMPACT, tiny, records).ids
                known = action if action == "up" else INVALID_ACTION
                assert tiny.decode(ids).split("<record>")[0].endswith(known)


@pytest.mark.parametrize("num_records", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("history_length", [0, 1, 2, 3])
def test_history_is_the_last_records(tiny, num_records, history_length):
    moves = ["up", "down", "left", "right", "up"][:num_records]
    records = [Record(BOARD, move) for move in moves]
    prompt = build(COMPACT, tiny, records, history_length)
    shown = [part[16:] for part in tiny.decode(prompt.ids).split("<record>")[:-1]]
    assert shown == moves[max(num_records - history_length, 0) :]
    assert prompt.num_dropped == 0


@pytest.mark.parametrize("max_tokens, dropped", [(52, 0), (51, 1), (34, 1), (33, 2)])
def test_oldest_history_is_dropped_first_and_counted(tiny, max_tokens, dropped):
    records = [Record(BOARD, "up"), Record(BOARD, "down")]
    prompt = build(COMPACT, tiny, records, 2, max_tokens)
    assert prompt.num_dropped == dropped
    assert len(prompt.ids) <= max_tokens
    shown = [part[16:] for part in tiny.decode(prompt.ids).split("<record>")[:-1]]
    assert shown == ["up", "down"][dropped:]


def test_prompt_that_cannot_fit_is_an_error_not_a_cut(tiny):
    with pytest.raises(UserError, match=r"max_prompt_tokens=15.* 16 tokens"):
        build(COMPACT, tiny, [Record(BOARD, "up")], 2, max_tokens=15)


def test_words_for_a_language_model_are_one_message():
    tokenizer = byte_tokenizer(chat=True)
    records = [Record(f"board {i}", f"move {i}") for i in range(1, 6)]
    ids = build(WORDS, tokenizer, records).ids
    text = tokenizer.decode(ids)
    assert text.startswith("<|im_start|>user\n")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert sum(i == tokenizer.id_of("<|im_start|>") for i in ids) == 2
    expected_order = [
        "You are the player",
        "# is a wall",
        "Your task",
        "Steps taken so far: 5",
        "[Observation 4:\nboard 4\nAction 4: move 4]",
        "[Observation 5:\nboard 5\nAction 5: move 5]",
        "step 6",
        BOARD,
        "up, down, left, right",
        "<think> and </think>",
        "<action> and </action>",
    ]
    places = [text.index(part) for part in expected_order]
    assert places == sorted(places)
    assert "board 3" not in text


def test_words_keep_the_published_limit_even_as_bytes():
    """1024 tokens, with a full history and a board of the longest symbols."""
    records = [Record(BOARD.replace("X", "√"), "right")] * 14
    prompt = build(WORDS, byte_tokenizer(chat=True), records, max_tokens=1024)
    assert prompt.num_dropped == 0
    assert len(prompt.ids) <= 1024


def test_first_step_is_told_of_no_history():
    tokenizer = byte_tokenizer(chat=False)
    text = tokenizer.decode(build(WORDS, tokenizer).ids)
    assert "taken so far" not in text
    assert "step 1" in text
    assert "<|im_start|>" not in text


def test_prompts_of_a_group_begin_alike():
    """What does not change comes first, so that a server can reuse it."""
    tokenizer = byte_tokenizer(chat=True)
    first = tokenizer.decode(build(WORDS, tokenizer).ids)
    later = tokenizer.decode(build(WORDS, tokenizer, [Record(BOARD, "up")]).ids)
    rules_end = first.index("\nThis is step")
    assert rules_end > len(first) / 2
    assert later[:rules_end] == first[:rules_end]


def test_reply_of_a_language_model_ends_with_its_own_token():
    tokenizer = byte_tokenizer(chat=True)
    end = tokenizer.id_of("<|im_end|>")
    assert stop_ids(WORDS, tokenizer) == (end,)
    reply = encode_reply(WORDS, tokenizer, "up")
    assert (reply.dtype, reply[-1]) == (np.int32, end)
    assert parse_action(tokenizer.decode(reply)) == ("up", "ok")


def test_end_of_many_tokens_does_not_stop_a_reply():
    """Its first token would; the model's own end token must come after it."""
    tokenizer = byte_tokenizer(chat=False)
    end = tokenizer.id_of("<eos>")
    assert stop_ids(COMPACT, tokenizer) == (end,)
    reply = encode_reply(COMPACT, tokenizer, "up")
    assert reply.tolist() == [*tokenizer.encode("<action>up</action>"), end]


@pytest.mark.parametrize("template", [WORDS, COMPACT])
def test_model_without_an_end_token_is_refused(template):
    tokenizer = byte_tokenizer(chat=False, knows_end=False)
    with pytest.raises(UserError, match="eos_token"):
        stop_ids(template, tokenizer)
    with pytest.raises(UserError, match="eos_token"):
        encode_reply(template, tokenizer, "up")


def shop_scene(observation):
    """Two pages into an expert's visit of the generated shop, in one of its modes."""
    (task_id,) = envs.tasks("webshop", "train", count=1, observation=observation).ids
    steps = envs.expert("webshop", task_id, observation=observation)
    records = [Record(step.observation, step.action) for step in steps[:2]]
    actions = steps[2].info["admissible_actions"]
    return Scene(records, 2, steps[0].observation, steps[2].observation, actions)


@pytest.mark.parametrize("observation", ["text", "text_rich"])
def test_the_shop_s_prompt_says_the_wish_once_and_every_page(observation):
    scene = shop_scene(observation)
    wish = scene.first_observation.split("Instruction:")[1].split("Find me ")[1]
    wish = "Find me " + wish.split(" [SEP]")[0].split("\n")[0]
    for name in ("webshop", "webshop_compact"):
        prompt = PROMPTS[name].prompt(scene)
        assert prompt.count(wish) == 1
        assert "Description" in prompt  # The page now, and in words those before.
        assert ("Page 1" in prompt) == (name == "webshop")
        assert scene.records[1].action in prompt
    actions = PROMPTS["webshop"].prompt(scene).split("possible actions:\n")[1]
    assert actions.startswith("\n".join(f"'{a}'" for a in scene.admissible_actions))


def test_the_household_s_prompt_says_task_state_and_actions():
    first = "Welcome!\n\nYour task is to: heat some egg.\nLocation: middle of the room."
    now = "You arrive at fridge 1. The fridge 1 is closed.\nLocation: fridge 1."
    scene = Scene([Record(first, "go to fridge 1")], 1, first, now, ["look", "open it"])
    prompt = PROMPTS["alfworld"].prompt(scene)
    assert "Your task: heat some egg.\n" in prompt
    assert f"Observation 1:\n{first}\nAction 1: go to fridge 1]" in prompt
    assert f"step 2. You see now:\n{now}\n" in prompt
    assert "possible actions:\n'look'\n'open it'\n" in prompt
    compact = PROMPTS["alfworld_compact"].prompt(scene)
    assert compact.startswith("look\nopen it\n") and compact.endswith(
        "\nheat some egg.\n"
    )


@pytest.mark.parametrize("name", ["alfworld", "alfworld_compact", "webshop_compact"])
def test_text_of_any_kind_has_words_in_the_small_vocabulary(name):
    tokenizer = load_tokenizer("preset:text_tiny")
    scene = Scene([], 0, "Your task is to: x", "Ünïcode ✨ 漢字\t\x00", ["a 1"])
    text = PROMPTS[name].prompt(scene)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    reply = encode_reply(PROMPTS[name], tokenizer, "go to fridge 12")
    assert tokenizer.decode(reply).startswith("<action>go to fridge 12</action>")
    assert parse_action(tokenizer.decode(reply)) == ("go to fridge 12", "ok")
