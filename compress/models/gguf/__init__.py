"""GGUF files as source models, and the importance matrices of llama.cpp."""
