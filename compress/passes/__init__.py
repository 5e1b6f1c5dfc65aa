"""Passes: one method, one file. They never import each other."""
