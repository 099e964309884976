"""Models: what a decoder is made of, and the decoder itself.

`config`, `matrices`, `weights` and `quantization_plan` describe the parts of a decoder. `program` says what a program
is, and `step` is that of a decoder; `block` runs one layer of it, and `decoder` all of them. `layers` and `elementwise`
are the steps between the products; `bounds` limits their error. `sampling` turns logits into a token, and `generation`
continues a prompt; `perplexity` and `replay` measure.
"""
