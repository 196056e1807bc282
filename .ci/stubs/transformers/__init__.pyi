# For pyright alone: the real one imports every model of the package, most of what pyright would read.
from typing import Any

def __getattr__(name: str) -> Any: ...
