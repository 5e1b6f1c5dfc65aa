"""The decoder: how a checkpoint is found, read and run block by block."""
