"""Environments behind one protocol."""
