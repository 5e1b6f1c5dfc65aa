"""The runner: loads an artifact in its own runtime and measures it. Without torch, so it goes to the device."""
