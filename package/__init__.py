"""The `__init__` of the installed package minimal_moe. The files of this repository need none."""
from importlib.metadata import version

__version__ = version("minimal-moe")
