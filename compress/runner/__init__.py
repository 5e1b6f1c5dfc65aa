"""The runner: loads an artifact in its own runtime and measures it. Imports no torch, so it goes to the device as it is."""
