"""GGUF files: their header, their tokenizer, and the architectures of models in them."""
