"""The committed gRPC stubs are what the proto file gives, and accept old grpcio."""

from __future__ import annotations

import re

from tests.ci_scripts import ci_script

_generate = ci_script("generate")


def test_regenerating_changes_nothing():
    for name, text in _generate.generate().items():
        assert (_generate.FOLDER / name).read_text() == text, (
            f"run: python .ci/generate.py ({name} differs)"
        )


def test_stubs_accept_grpcio_1_78_and_any_protobuf():
    grpc_stub = (_generate.FOLDER / "jvlab_pb2_grpc.py").read_text()
    assert "GRPC_GENERATED_VERSION = '1.78.0'" in grpc_stub
    assert (
        "ValidateProtobufRuntimeVersion"
        not in (_generate.FOLDER / "jvlab_pb2.py").read_text()
    )


def test_every_field_of_the_proto_is_explained_or_plain():
    text = (_generate.FOLDER / "jvlab.proto").read_text()
    services = re.findall(r"service \w+ \{(.*?)\n\}", text, re.S)
    assert len(services) == 3
    documented = re.findall(r"  // .*\n(?:  // .*\n)*  rpc \w+", services[0])
    assert len(documented) == len(re.findall(r"  rpc \w+", services[0]))
