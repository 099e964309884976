"""GPTQModel: what an import of a layer writes to standard output, where a program's own output goes."""

import subprocess
import sys

command = [sys.executable, "-c", "import gptqmodel.nn_modules.qlinear.torch"]
print(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
