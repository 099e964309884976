"""Models: what a decoder is made of, and the decoder itself.

`config`, `weights` and `quantization_plan` say what a decoder is made of; `block` is one of its layers, and `decoder`
all of them. `elementwise` are the steps between the products. `sampling` turns logits into a token; `perplexity` and
`replay` measure.
"""
