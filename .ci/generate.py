"""Regenerate the gRPC stubs in jvlab/wire: `python .ci/generate.py`. Needs grpcio-tools (the `dev` extra).

protoc's Python output requires a grpcio and a protobuf at least as new as the generator's. Its output for this file has
not changed since the version below, so the requirement is lowered to it: the stubs load on every later version, and
regenerating with any of them gives the same bytes.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

OLDEST_GRPC = "1.78.0"
FOLDER = Path(__file__).resolve().parent.parent / "jvlab" / "wire"
NAMES = ("jvlab_pb2.py", "jvlab_pb2.pyi", "jvlab_pb2_grpc.py")


def generate() -> dict[str, str]:
    """The three stub files, by name. In a process of its own: within one of many threads protoc once crashed it."""
    protoc = [sys.executable, "-m", "grpc_tools.protoc", f"-I{FOLDER}"]
    with tempfile.TemporaryDirectory() as out:
        outs = [f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
        subprocess.run([*protoc, *outs, "jvlab.proto"], check=True, timeout=120)
        return {
            name: _normalise(name, (Path(out) / name).read_text()) for name in NAMES
        }


def _normalise(name: str, text: str) -> str:
    if name == "jvlab_pb2.py":
        text = re.sub(r"# Protobuf Python Version: .*\n", "", text)
        text = re.sub(
            r"from google.protobuf import runtime_version as _runtime_version\n",
            "",
            text,
        )
        text = re.sub(
            r"_runtime_version\.ValidateProtobufRuntimeVersion\((.|\n)*?\n\)\n",
            "",
            text,
        )
    if name == "jvlab_pb2_grpc.py":
        text = re.sub(
            r"GRPC_GENERATED_VERSION = '.*'",
            f"GRPC_GENERATED_VERSION = '{OLDEST_GRPC}'",
            text,
        )
        text = text.replace(
            "import jvlab_pb2 as jvlab__pb2",
            "from jvlab.wire import jvlab_pb2 as jvlab__pb2",
        )
    return text


def main() -> int:
    for name, text in generate().items():
        (FOLDER / name).write_text(text)
        print("wrote", name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
