"""The offload engine: the paper's section 3 on a port; it knows neither the device nor the model.

`placement` decides, `blobs` are what is moved, `traffic` puts copies and kernels in order, `engine` does what was
decided. `speculation` finds out whether guesses pay, `cost` what the host should compute. `journal` and `recovery` are
for when something fails. `hooks` lets the suite look at the decisions.
"""

from lowbit_cuda.engine.account import Account, EngineError, EngineLostError
from lowbit_cuda.engine.blobs import device_bytes, slots_within, stride
from lowbit_cuda.engine.cost import Choice, Job, Rates, choose, measured
from lowbit_cuda.engine.engine import Engine
from lowbit_cuda.engine.placement import Placement
from lowbit_cuda.engine.speculation import Measurement, Plan, Trial

__all__ = [
    "Account",
    "Choice",
    "Engine",
    "EngineError",
    "EngineLostError",
    "Job",
    "Measurement",
    "Placement",
    "Plan",
    "Rates",
    "Trial",
    "choose",
    "device_bytes",
    "measured",
    "slots_within",
    "stride",
]
