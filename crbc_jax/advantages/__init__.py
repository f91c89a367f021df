"""Advantage estimators: TransitionBatch -> one advantage per step."""
