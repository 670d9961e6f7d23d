"""Rollout side of the Ray layer: engines, the rollout manager, batches on their way to training ranks."""
