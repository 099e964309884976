"""GGUF files: header, tensors, architectures and tokenizer."""
