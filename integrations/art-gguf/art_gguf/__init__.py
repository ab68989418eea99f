"""A GGUF file -> the folder of a Hugging Face model in float32, which can be trained and served like any other."""
