"""Calibration: text sources, token windows, statistics of layer inputs. Imports nothing else of edgepress."""

__compress__ = "0.1.0"
