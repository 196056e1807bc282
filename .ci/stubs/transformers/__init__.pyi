# For pyright alone: the package's own __init__ imports all its models, which takes longer to read than the rest of jvlab.
from typing import Any

def __getattr__(name: str) -> Any: ...
