"""Ray layer: devices, groups of training ranks, rollout engines. The only room that imports ray."""
