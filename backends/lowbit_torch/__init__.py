"""Quantised linear layers for PyTorch models, computed by any lowbit backend.

`QuantLinear` takes the place of ``torch.nn.Linear``; `replace_linears` puts it into a model (see `lowbit_torch.layer`).
`lowbit_torch.operator` registers the product with PyTorch, and `lowbit_torch.linears` says which layers can be
replaced. `Uptraining` continues the training of a model, as pooled heads require (see `lowbit_torch.uptraining`).
"""

from lowbit_torch.layer import QuantLinear, Replacement, replace_linears
from lowbit_torch.uptraining import Uptraining

__all__ = ["QuantLinear", "Replacement", "Uptraining", "replace_linears"]
