"""Exact breadth-first search over Sokoban, forwards by pushes or backwards by pulls.

A set of cells is an integer, bit `row * width + column` a cell. A layer of the search
maps each arrangement of boxes (a set) to the player's possible cells (a set), so that
walking is a few shifts whatever the number of states. One move of the player, pushing
or not, is one step.

A direction is a pair `(left, right)`: `cells << left >> right` moves a set that way,
and `cells << right >> left` moves it back.
"""

from typing import NamedTuple

Layer = dict[int, int]  # Boxes -> players.


class Board(NamedTuple):
    """What never changes in a level. The border holds no floor, so no shift wraps."""

    width: int
    floor: int  # Targets included.
    targets: int

    @property
    def directions(self) -> tuple[tuple[int, int], ...]:
        """Up, down, left and right, as shifts."""
        return (0, self.width), (self.width, 0), (0, 1), (1, 0)


class SearchTooLarge(ValueError):
    """The search would hold more states than it was allowed to."""


def connected(board: Board, start: int) -> int:
    """Returns the floor that can be walked to from `start` if there are no boxes."""
    reached, before, width = start, 0, board.width
    while reached != before:
        before = reached
        reached |= reached << 1 | reached >> 1 | reached << width | reached >> width
        reached &= board.floor
    return reached


def layers_to_solved(board: Board, max_moves: int, max_states: int) -> list[Layer]:
    """Returns the states that 0, 1, ... `max_moves` moves, and no fewer, solve.

    Each layer is complete. There are fewer layers where no state is further away, or
    where the next one would exceed `max_states` states in all.
    """
    layers = [{board.targets: board.floor & ~board.targets}]
    seen = dict(layers[0])
    num_states = layers[0][board.targets].bit_count()
    while len(layers) <= max_moves:
        layer = _next_layer(board, layers[-1], seen, pull=True)
        num_states += _size(layer)
        if not layer or num_states > max_states:
            break
        layers.append(layer)
    return layers


def solve(board: Board, player: int, boxes: int, max_states: int) -> list[int] | None:
    """Returns a shortest solution as actions 1 to 4, or None if there is none.

    Among shortest solutions the choice is fixed: the same at every call.

    Raises:
        SearchTooLarge: if more than `max_states` states were reached.
    """
    live = _live_cells(board)
    layers = [{boxes: player}]
    seen = dict(layers[0])
    num_states = 1
    while board.targets not in layers[-1]:
        layer = _next_layer(board, layers[-1], seen, pull=False, live=live)
        if not layer:
            return None
        num_states += _size(layer)
        if num_states > max_states:
            raise SearchTooLarge(
                f"no solution of {len(layers)} moves or fewer, and more than "
                f"{max_states:,} states; give the search a higher max_states"
            )
        layers.append(layer)
    return _trace_back(board, layers)


def _size(layer: Layer) -> int:
    return sum(players.bit_count() for players in layer.values())


def _live_cells(board: Board) -> int:
    """Cells from which a lone box can be pushed to some target; others are lost."""
    live, before = board.targets, 0
    while live != before:
        before = live
        for left, right in board.directions:
            # A box came from behind, where the player stood one further.
            came_from = live << right >> left & board.floor
            live |= came_from & (board.floor << left >> right)
    return live


def _next_layer(
    board: Board, layer: Layer, seen: Layer, pull: bool, live: int = -1
) -> Layer:
    """Returns the states one move from `layer` that `seen` lacks, and adds them."""
    following: Layer = {}
    width, floor, directions = board.width, board.floor, board.directions
    for boxes, players in layer.items():
        free = floor & ~boxes
        walked = players << 1 | players >> 1 | players << width | players >> width
        walked &= free & ~seen.get(boxes, 0)
        if walked:
            following[boxes] = following.get(boxes, 0) | walked
        for left, right in directions:
            # A pull needs room behind the player, a push two cells ahead of it.
            if pull:
                room = free << left >> right
            else:
                room = (free & live) << 2 * right >> 2 * left
            movers = players & (boxes << right >> left) & room
            while movers:
                player = movers & -movers
                movers ^= player
                ahead = player << left >> right
                if pull:
                    moved, at = boxes ^ ahead ^ player, player << right >> left
                else:
                    moved, at = boxes ^ ahead ^ (ahead << left >> right), ahead
                if at & ~seen.get(moved, 0):
                    following[moved] = following.get(moved, 0) | at
    for boxes, players in following.items():
        seen[boxes] = seen.get(boxes, 0) | players
    return following


def _trace_back(board: Board, layers: list[Layer]) -> list[int]:
    """Walks from a solved state of the last layer to the only state of the first."""
    boxes = board.targets
    player = layers[-1][boxes] & -layers[-1][boxes]
    actions = []
    for layer in reversed(layers[:-1]):
        action, player, boxes = _step_back(board, layer, player, boxes)
        actions.append(action)
    return actions[::-1]


def _step_back(
    board: Board, layer: Layer, player: int, boxes: int
) -> tuple[int, int, int]:
    """Returns the first action that leads here from `layer`, and where from."""
    for action, (left, right) in enumerate(board.directions, start=1):
        before, ahead = player << right >> left, player << left >> right
        if before & layer.get(boxes, 0):
            return action, before, boxes
        unpushed = boxes ^ ahead ^ player
        if ahead & boxes and before & layer.get(unpushed, 0):
            return action, before, unpushed
    raise AssertionError("a state of a layer has no predecessor in the one before it")
