"""Stands in for AppWorld, whose task data the tests do not have."""


def update_root(root):
    pass
