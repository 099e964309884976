"""The contestants: lowbit's kernels and those of other projects, each as one class with the same few methods.

A module here hands one library the weights in its own layout, asks it for products in the way in which a model that
runs on it would, and says how many bytes of codes, scales and zeros a product reads and which weights the library
then holds. Layouts come from `lowbit_adapters`, where the same kernels stand under the conformance suite.
"""
