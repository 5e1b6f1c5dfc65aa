"""Exporters: a compressed model in, files that stock runtimes load out."""

__compress__ = "0.1.0"
