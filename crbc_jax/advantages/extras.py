"""Columns that only single methods need."""

from jaxtyping import Shaped

from crbc_jax.types import AnyArray, TransitionBatch


def require_column(
    batch: TransitionBatch, name: str, method: str, meaning: str
) -> Shaped[AnyArray, "groups rows"]:
    """Returns extras[name]; its absence is an error that says what to add."""
    if name not in batch.extras:
        raise ValueError(
            f"advantage method {method!r} needs the column {name!r} ({meaning}), one "
            f"value a step; the steps have the extra columns {sorted(batch.extras)}"
        )
    return batch.extras[name]
