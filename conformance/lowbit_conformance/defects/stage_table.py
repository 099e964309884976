"""All operations in stages, and the mistakes that their stages may have."""

from collections.abc import Mapping
from functools import cache

from lowbit_conformance.defects.defect import Defect
from lowbit_conformance.defects.machines import of_machines
from lowbit_conformance.defects.stages import Stages, members
from lowbit_conformance.defects.stages_layers import LAYERS
from lowbit_conformance.defects.stages_numbers import NUMBERS
from lowbit_conformance.defects.stages_products import PRODUCTS

STAGES: Mapping[str, Stages] = {**LAYERS, **NUMBERS, **PRODUCTS}


@cache
def of_stages(operation: str) -> tuple[Defect, ...]:
    """All mistakes in the stages of an operation, or in the rules of a stateful one."""
    return tuple(members(operation, STAGES[operation]) if operation in STAGES else of_machines(operation))
