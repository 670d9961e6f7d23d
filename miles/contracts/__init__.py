"""Artifacts that can prove what they are: canonical JSON, atomic publication, checkpoint manifests, the chain.

This room imports the standard library only, so `miles verify` runs on any machine without torch.
"""
