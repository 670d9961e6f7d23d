"""Ready-made reward functions for `--custom-rm-path`."""
