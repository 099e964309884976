"""Models: what a decoder is made of, and the decoder itself."""
