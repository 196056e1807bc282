"""A vLLM worker for several ranks on one GPU, which vLLM 0.32.0 has no mode for; `tp_probe.py` has the settings."""

from __future__ import annotations

import os
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import Worker


class OneCardWorker(Worker):
    """Every rank on the first visible GPU, under a host name of its own."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        # before this process's first NCCL call
        os.environ["NCCL_HOSTID"] = f"process-{os.getpid()}"
        parallel = vllm_config.parallel_config
        card = current_platform.visible_device_id_to_physical_device_id(0)
        # device_ids=[0, 0] is refused as duplicate
        parallel.assigned_physical_gpu_ids = [card] * parallel.world_size
        super().__init__(vllm_config, *args, **kwargs)
