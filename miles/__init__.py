"""miles: value pretraining and PPO for language models on Megatron-core, SGLang and Ray."""

__version__ = "0.1.0"
