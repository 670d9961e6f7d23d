"""Samples, column batches, micro-batch schedules and prompt sources. Imports neither Ray nor Megatron."""
