"""PPO for language models under Megatron model parallelism, runnable and verifiable on any machine."""

__version__ = "0.1.0"
