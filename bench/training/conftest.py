"""Without torch, which only training needs, the modules that train are not searched for examples."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("torch") else ["network.py", "train.py", "writing.py"]
