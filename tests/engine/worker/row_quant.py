"""A quantisation registered with vLLM's own `register_quantization_config`: int8 by rows, in an order of its own.

What it makes of a weight has another dtype, shape and order than what was loaded, beside a parameter of scales and a
bias that is doubled: no format of jvlab's, and done twice it would be wrong. It runs on every device.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.parameter import ModelWeightParameter
from vllm.model_executor.utils import replace_parameter

NAME = "jvlab_test_rows"
# the layers that are quantised; others are held as loaded
PARTS = ("qkv_proj", "down_proj")


class RowsMethod(LinearMethodBase):
    """int8 with one scale per row; rows in reverse, and transposed."""

    made: ClassVar[dict[str, Any]] = {}  # by prefix: layers of the newest model
    breaks: ClassVar[str] = ""  # a layer that can't be processed, for tests of failures

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **more: Any,
    ) -> None:
        data = torch.empty(
            sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype
        )
        weight = ModelWeightParameter(
            data=data, input_dim=1, output_dim=0, weight_loader=more["weight_loader"]
        )
        layer.register_parameter("weight", weight)
        self.made[self.prefix] = layer

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.prefix == self.breaks:
            raise RuntimeError("this kernel is out of order")
        weight = layer.weight.data.float()
        scale = weight.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
        packed = (weight / scale).round().clamp(-127, 127).to(torch.int8).flip(0)
        replace_parameter(layer, "weight", packed.t().contiguous())
        replace_parameter(layer, "weight_scale", scale.flip(0).reshape(-1).contiguous())
        if getattr(layer, "bias", None) is not None:
            layer.bias.data = layer.bias.data * 2  # other memory

    def apply(
        self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        product = (x.float() @ layer.weight.float()) * layer.weight_scale
        out = product.flip(-1).to(x.dtype)
        return out if bias is None else out + bias / 2


@register_quantization_config(NAME)
class RowsConfig(QuantizationConfig):
    """Quantises some linear layers of what an ordinary checkpoint holds."""

    @classmethod
    def get_name(cls) -> Any:
        return NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> RowsConfig:
        return cls()

    def get_quant_method(
        self, layer: torch.nn.Module, prefix: str
    ) -> QuantizeMethodBase | None:
        if not isinstance(layer, LinearBase):
            return None
        return (
            RowsMethod(prefix) if prefix.endswith(PARTS) else UnquantizedLinearMethod()
        )
