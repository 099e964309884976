"""Models: what a decoder is made of, and the decoder itself.

`config`, `matrices`, `weights` and `quantization_plan` describe the parts of a decoder, and `step` is its program;
`block` is one of its layers, and `decoder` all of them. `layers` and `elementwise` are the steps between the products;
`bounds` limits their error. `sampling` turns logits into a token; `perplexity` and `replay` measure.
"""
