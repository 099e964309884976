"""What holds for every test here: none sees what `lowbit tune` may have found on this machine.

The environment is set when pytest reads this file, so programs that tests start have it too.
"""

import os

os.environ["LOWBIT_CPPYY_TUNED"] = "off"
