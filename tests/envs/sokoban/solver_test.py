import collections

import numpy as np
import pytest

from crbc_jax.envs.sokoban import catalogue, rules, solver
from crbc_jax.envs.sokoban.level import parse_level, to_board
from crbc_jax.envs.sokoban.options import Options


def fewest_moves(level):
    """Plain breadth-first search over states, by the rules themselves."""
    distance = {level.cells.tobytes(): 0}
    queue = collections.deque([level.cells])
    while queue:
        cells = queue.popleft()
        for action in range(1, 5):
            after = rules.step(level.layout, cells, action)
            key = after.cells.tobytes()
            if key not in distance:
                distance[key] = distance[cells.tobytes()] + 1
                if after.solved:
                    return distance[key]
                queue.append(after.cells)
    return None


def play(level, actions):
    cells = level.cells
    for action in actions:
        cells, _, solved = rules.step(level.layout, cells, action)
    return solved


@pytest.mark.parametrize("num_boxes", [1, 2])
def test_solutions_are_valid_and_shortest(num_boxes):
    options = Options(num_boxes=num_boxes, max_moves=9)
    for task_id in catalogue.list_tasks("train", 12, options).ids:
        level = catalogue.find_level(task_id, options)
        actions = solver.solve(*to_board(level), max_states=10**6)
        assert play(level, actions)
        assert len(actions) == fewest_moves(level) == level.optimal_moves


def test_layers_hold_every_state_once_at_its_distance():
    text = "######\n#  . #\n# $  #\n# @# #\n######"
    board, _, _ = to_board(parse_level(text, "test"))
    layers = solver.layers_to_solved(board, max_moves=50, max_states=10**6)
    num_states = 0
    for moves, layer in enumerate(layers):
        for boxes, players in layer.items():
            while players:
                player, players = players & -players, players & (players - 1)
                num_states += 1
                actions = solver.solve(board, player, boxes, max_states=10**6)
                assert len(actions) == moves
    free = board.floor.bit_count()
    assert 0 < num_states <= free * (free - 1)


def test_layers_stop_whole_at_the_bound():
    level = parse_level("######\n#@$ .#\n#    #\n######", "test")
    board, _, _ = to_board(level)
    whole = solver.layers_to_solved(board, max_moves=30, max_states=10**6)
    bounded = solver.layers_to_solved(board, max_moves=30, max_states=20)
    assert 0 < len(bounded) < len(whole)
    assert bounded == whole[: len(bounded)]


def test_unsolvable_and_too_large_are_told_apart():
    corner = parse_level("#####\n#$ .#\n# @ #\n#####", "corner")
    assert solver.solve(*to_board(corner), max_states=100) is None
    easy = parse_level("######\n#@$ .#\n######", "easy")
    assert solver.solve(*to_board(easy), max_states=100) == [4, 4]
    with pytest.raises(solver.SearchTooLarge, match="more than 2 states"):
        solver.solve(*to_board(easy), max_states=2)


def test_to_board_reads_every_kind_of_cell():
    level = parse_level("######\n#+$* #\n######", "kinds")
    board, player, boxes = to_board(level)
    assert (board.targets, player) == (1 << 7 | 1 << 9, 1 << 7)
    assert boxes == 1 << 8 | 1 << 9
    assert board.floor == sum(1 << cell for cell in (7, 8, 9, 10))
    assert level.cells.dtype == np.int8
