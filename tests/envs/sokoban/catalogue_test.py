import hashlib
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from crbc_jax import envs
from crbc_jax.envs.sokoban import catalogue, generator
from crbc_jax.envs.sokoban.level import parse_level, split_of
from crbc_jax.envs.sokoban.options import Options

POOLS = {
    "default": Options(),
    "hard": Options(min_moves=6, max_moves=13, max_steps=20),
    "two boxes": Options(size=7, num_boxes=2, max_moves=12),
    "four boxes": Options(
        size=10, num_boxes=4, min_moves=8, max_moves=15, max_steps=20
    ),
}
BOXOBAN = pathlib.Path(__file__).parents[3] / "../shared/data/sokoban/boxoban"
EASY = "######\n#@$ .#\n#    #\n######"


def all_levels(split, count, options):
    ids = catalogue.list_tasks(split, count, options).ids
    return [catalogue.find_level(task_id, options) for task_id in ids]


@pytest.mark.parametrize("pool", POOLS)
def test_layouts_of_the_splits_are_disjoint(pool):
    count = 400 if POOLS[pool].size == 6 else 30
    train, held_out = (
        {level.layout.tobytes() for level in all_levels(split, count, POOLS[pool])}
        for split in envs.SPLITS
    )
    assert not train & held_out
    assert len(held_out) > 0.9 * count  # Hardly any layout comes twice.


@pytest.mark.parametrize("pool", ["default", "hard"])
def test_no_level_of_the_panel_comes_twice(pool):
    panel = all_levels("eval", 256, POOLS[pool])
    assert len({lv.layout.tobytes() + lv.cells.tobytes() for lv in panel}) == 256


def test_a_split_with_few_levels_lists_those():
    options = Options(size=5, min_moves=6, max_moves=7)
    assert 0 < len(catalogue.list_tasks("eval", 25, options).ids) < 25


def test_layouts_of_the_splits_are_disjoint_across_pools():
    easy, hard = POOLS["default"], POOLS["hard"]
    train = {level.layout.tobytes() for level in all_levels("train", 500, easy)}
    assert not train & {lv.layout.tobytes() for lv in all_levels("eval", 200, hard)}


@pytest.mark.parametrize("pool", POOLS)
def test_levels_are_as_long_as_asked_and_solvable(pool):
    options = POOLS[pool]
    count = 100 if options.size == 6 else 8
    for task_id in catalogue.list_tasks("eval", count, options).ids:
        moves = catalogue.find_level(task_id, options).optimal_moves
        assert options.min_moves <= moves <= options.max_moves
        steps = envs.sokoban.expert(task_id, options)
        assert len(steps) == moves


def test_lengths_cover_the_whole_range():
    found = {level.optimal_moves for level in all_levels("train", 300, POOLS["hard"])}
    assert found == set(range(6, 14))


def test_smallest_board_never_fails():
    """PITFALLS C9: seeds 0 to 199, members of a group byte for byte equal."""
    options = Options(size=5, min_moves=1, max_moves=5)
    for task_id in catalogue.list_tasks("train", 200, options).ids:
        group = [catalogue.find_level.__wrapped__(task_id, options) for _ in range(3)]
        assert len({(lv.layout.tobytes(), lv.cells.tobytes()) for lv in group}) == 1
        text = envs.sokoban.make(options).reset(options={"task": task_id})[0]
        assert (text.count("P") + text.count("S"), text.count("X")) == (1, 1)


def test_a_version_names_the_same_levels_for_ever():
    """If this hash must change, so must the version, and every digest with it."""
    digest = hashlib.sha256()
    for options in POOLS.values():
        for level in all_levels("eval", 5, options):
            digest.update(level.layout.tobytes() + level.cells.tobytes())
    assert generator.VERSION == "sokoban-levels-1"
    assert digest.hexdigest()[:16] == "ce5c60d94e1440f7"


def describe_tasks(hash_seed, source):
    """The tasks as a fresh interpreter lists them."""
    program = (
        "import json, sys; from crbc_jax import envs\n"
        "o = {'levels': sys.argv[1]}\n"
        "t = [envs.tasks('sokoban', s, count=9, **o) for s in ('train', 'eval')]\n"
        "e = envs.make('sokoban', **o)\n"
        "r = [e.reset(options={'task': i})[0] for s in t for i in s.ids]\n"
        "print(json.dumps([t, r, e.reset(seed=3)[0]]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(source)],
        env=os.environ
        | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        check=True,
        text=True,
    )
    return json.loads(result.stdout)


def test_processes_with_other_hash_seeds_list_the_same_tasks():
    first, second = (describe_tasks(seed, "generated") for seed in ("1", "2"))
    assert first == second
    assert list(first[0][0][0]) == sorted(first[0][0][0])


def write_levels(folder, count=40):
    """Writes files of small levels that differ in their walls."""
    files = {}
    for index in range(count):
        row = "".join(" #"[index >> bit & 1] for bit in range(6))
        text = f"########\n#@$ . ##\n#{row}#\n########"
        files.setdefault(f"{index % 4}/{index % 3}.txt", []).append(text)
    for name, texts in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"; {i}\n{t}\n\n" for i, t in enumerate(texts)))


def test_listing_order_of_the_folder_does_not_matter(tmp_path, monkeypatch):
    write_levels(tmp_path)
    options = Options(levels=str(tmp_path))
    first = catalogue.list_tasks("train", 10, options)
    listing = list(tmp_path.rglob("*.txt"))
    for order in (listing[::-1], listing[3:] + listing[:3]):
        catalogue._level_files.cache_clear()
        monkeypatch.setattr(pathlib.Path, "rglob", lambda *_, order=order: iter(order))
        assert catalogue.list_tasks("train", 10, options) == first
    assert len(first.ids) == 10 and list(first.ids) == sorted(first.ids)


def test_files_are_split_by_layout_and_counted_honestly(tmp_path):
    write_levels(tmp_path)
    options = Options(levels=str(tmp_path))
    train = catalogue.list_tasks("train", 10**6, options)
    held_out = catalogue.list_tasks("eval", 10**6, options)
    assert len(train.ids) + len(held_out.ids) == 40
    assert train.digest != held_out.digest
    layouts = [
        {catalogue.find_level(i, options).layout.tobytes() for i in task_set.ids}
        for task_set in (train, held_out)
    ]
    assert layouts[0] and layouts[1] and not layouts[0] & layouts[1]


def test_digest_covers_the_content_of_files(tmp_path):
    path = tmp_path / "a.txt"
    digests = set()
    for text in (EASY, EASY.replace("@$ .", " @$.")):  # One layout, two starts.
        path.write_text(text)
        catalogue._read_file.cache_clear()
        split = split_of("######\n#   .#\n#    #\n######")
        task_set = catalogue.list_tasks(split, 1, Options(levels=str(path)))
        assert task_set.ids == ("a.txt#000000",)
        digests.add(task_set.digest)
    assert len(digests) == 2


def test_boxoban_files():
    if not BOXOBAN.exists():
        pytest.skip(f"no Boxoban levels in {BOXOBAN}")
    options = Options(levels=str(BOXOBAN), max_steps=200)
    train = catalogue.list_tasks("train", 1000, options).ids
    held_out = catalogue.list_tasks("eval", 1000, options).ids
    assert len(train) + len(held_out) == 320
    for task_id in train[:20] + held_out[:20]:
        level = catalogue.find_level(task_id, options)
        assert level.layout.shape == (10, 10)
        assert (level.layout == 2).sum() == 4
    assert envs.expert("sokoban", held_out[-1], levels=str(BOXOBAN), max_steps=200)


@pytest.mark.parametrize(
    "text, message",
    [
        (EASY.replace("@", "x"), r"unknown characters \['x'\]"),
        (EASY.replace("@", " "), "needs one player, has 0"),
        (EASY.replace("    ", " $  "), "has 2 and 1"),
        (EASY.replace("@$ .", "@ * "), "is solved at its start"),
        (EASY.replace("#    #", "#    "), "equally long"),
        (EASY.replace("#    #", "#     "), "border must be all wall"),
    ],
)
def test_bad_levels_are_named(text, message):
    with pytest.raises(ValueError, match=f"Sokoban level here: .*{message}"):
        parse_level(text, "here")


def test_no_levels_is_a_clear_error(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        envs.tasks("sokoban", "train", count=1, levels=str(tmp_path / "absent"))
    with pytest.raises(
        ValueError, match=r"no level file \(\*\.txt\).*Boxoban's are at"
    ):
        envs.tasks("sokoban", "train", count=1, levels=str(tmp_path))
    (tmp_path / "empty.txt").write_text("; 0\n\n")
    with pytest.raises(ValueError, match="holds no Sokoban level"):
        envs.tasks("sokoban", "train", count=1, levels=str(tmp_path))
    (tmp_path / "empty.txt").write_text(EASY)
    with pytest.raises(ValueError, match="has no '(train|eval)' task"):
        for split in envs.SPLITS:
            envs.tasks("sokoban", split, count=1, levels=str(tmp_path))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"size": 4}, "sokoban.size=4"),
        ({"num_boxes": 0}, "sokoban.num_boxes=0"),
        ({"min_moves": 0}, "sokoban.min_moves=0"),
        ({"min_moves": 9, "max_moves": 8}, "at least min_moves=9"),
        ({"max_moves": 16}, "sokoban.max_moves=16: .*max_steps=15"),
        ({"size": 5, "min_moves": 14, "max_moves": 14}, "min_moves=14"),
        ({"maxmoves": 3}, "did you mean 'max_moves'"),
    ],
)
def test_impossible_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        envs.tasks("sokoban", "train", count=1, **options)


def test_a_task_of_other_options_is_refused():
    task_id = catalogue.list_tasks("train", 1, POOLS["hard"]).ids[0]
    with pytest.raises(ValueError, match="same sokoban options"):
        catalogue.find_level(task_id, POOLS["default"])


def test_arrays_of_a_level_are_not_shared_with_an_episode():
    level = catalogue.find_level("6x6-1box-2to9moves-train-000000", Options())
    before = level.cells.copy()
    env = envs.make("sokoban")
    env.reset(options={"task": "6x6-1box-2to9moves-train-000000"})
    for action in ("up", "down", "left", "right"):
        env.step(action)
    np.testing.assert_array_equal(level.cells, before)
