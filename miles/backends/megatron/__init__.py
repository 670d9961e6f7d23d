"""Megatron backend: models, training steps and checkpoints on megatron-core.

Importing this package is free: `megatron.core` is imported by its submodules, and only after
`miles.backends.megatron.cpu_compat.install()` has run where there is no GPU.
"""
