# For pyright alone: the own __init__ of the package imports all its models, most of what pyright would read.
from typing import Any

def __getattr__(name: str) -> Any: ...
