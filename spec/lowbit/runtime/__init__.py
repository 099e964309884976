"""Running models: from a file and a backend to a decoder."""
