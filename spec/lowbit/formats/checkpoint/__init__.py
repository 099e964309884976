"""Checkpoint directories: ``config.json``, safetensors and ``tokenizer.json``, and their quantised copies."""
