from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReplicaState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REPLICA_STATE_UNSPECIFIED: _ClassVar[ReplicaState]
    STARTING: _ClassVar[ReplicaState]
    READY: _ClassVar[ReplicaState]
    LOST: _ClassVar[ReplicaState]
    FAILED: _ClassVar[ReplicaState]
    CLOSED: _ClassVar[ReplicaState]
    DRAINING: _ClassVar[ReplicaState]
    RESTARTING: _ClassVar[ReplicaState]

class Steering(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STEERING_UNSPECIFIED: _ClassVar[Steering]
    PAUSE: _ClassVar[Steering]
    RESUME: _ClassVar[Steering]
    SLEEP: _ClassVar[Steering]
    WAKE: _ClassVar[Steering]

class SyncPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SYNC_PHASE_UNSPECIFIED: _ClassVar[SyncPhase]
    PREPARE: _ClassVar[SyncPhase]
    HALT: _ClassVar[SyncPhase]
    MOVE: _ClassVar[SyncPhase]
    VERIFY: _ClassVar[SyncPhase]
    COMMIT: _ClassVar[SyncPhase]
    GO_ON: _ClassVar[SyncPhase]
    ABANDON: _ClassVar[SyncPhase]
    CHECK: _ClassVar[SyncPhase]
REPLICA_STATE_UNSPECIFIED: ReplicaState
STARTING: ReplicaState
READY: ReplicaState
LOST: ReplicaState
FAILED: ReplicaState
CLOSED: ReplicaState
DRAINING: ReplicaState
RESTARTING: ReplicaState
STEERING_UNSPECIFIED: Steering
PAUSE: Steering
RESUME: Steering
SLEEP: Steering
WAKE: Steering
SYNC_PHASE_UNSPECIFIED: SyncPhase
PREPARE: SyncPhase
HALT: SyncPhase
MOVE: SyncPhase
VERIFY: SyncPhase
COMMIT: SyncPhase
GO_ON: SyncPhase
ABANDON: SyncPhase
CHECK: SyncPhase

class Empty(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HoldRequest(_message.Message):
    __slots__ = ("holder",)
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    holder: str
    def __init__(self, holder: _Optional[str] = ...) -> None: ...

class HoldEvent(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    def __init__(self, sequence: _Optional[int] = ...) -> None: ...

class DetachRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CloseRequest(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class PoolRequest(_message.Message):
    __slots__ = ("pool",)
    POOL_FIELD_NUMBER: _ClassVar[int]
    pool: str
    def __init__(self, pool: _Optional[str] = ...) -> None: ...

class LaunchRequest(_message.Message):
    __slots__ = ("pool", "model", "replicas", "tensor_parallel", "load", "device", "engine_json", "env_json", "routing", "http", "http_port", "place", "place_json", "limits_json", "http_key", "restarts")
    POOL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_JSON_FIELD_NUMBER: _ClassVar[int]
    ENV_JSON_FIELD_NUMBER: _ClassVar[int]
    ROUTING_FIELD_NUMBER: _ClassVar[int]
    HTTP_FIELD_NUMBER: _ClassVar[int]
    HTTP_PORT_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    PLACE_JSON_FIELD_NUMBER: _ClassVar[int]
    LIMITS_JSON_FIELD_NUMBER: _ClassVar[int]
    HTTP_KEY_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    pool: str
    model: str
    replicas: int
    tensor_parallel: int
    load: str
    device: str
    engine_json: str
    env_json: str
    routing: str
    http: bool
    http_port: int
    place: str
    place_json: str
    limits_json: str
    http_key: bool
    restarts: int
    def __init__(self, pool: _Optional[str] = ..., model: _Optional[str] = ..., replicas: _Optional[int] = ..., tensor_parallel: _Optional[int] = ..., load: _Optional[str] = ..., device: _Optional[str] = ..., engine_json: _Optional[str] = ..., env_json: _Optional[str] = ..., routing: _Optional[str] = ..., http: _Optional[bool] = ..., http_port: _Optional[int] = ..., place: _Optional[str] = ..., place_json: _Optional[str] = ..., limits_json: _Optional[str] = ..., http_key: _Optional[bool] = ..., restarts: _Optional[int] = ...) -> None: ...

class LabStatus(_message.Message):
    __slots__ = ("lab", "pid", "host", "started", "lease_seconds", "holders", "detached", "pools", "version", "public_address", "metrics_url", "fingerprint", "away_seconds")
    LAB_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    DETACHED_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    METRICS_URL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    AWAY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    lab: str
    pid: int
    host: str
    started: float
    lease_seconds: float
    holders: _containers.RepeatedScalarFieldContainer[str]
    detached: bool
    pools: _containers.RepeatedCompositeFieldContainer[PoolStatus]
    version: str
    public_address: str
    metrics_url: str
    fingerprint: str
    away_seconds: float
    def __init__(self, lab: _Optional[str] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ..., started: _Optional[float] = ..., lease_seconds: _Optional[float] = ..., holders: _Optional[_Iterable[str]] = ..., detached: _Optional[bool] = ..., pools: _Optional[_Iterable[_Union[PoolStatus, _Mapping]]] = ..., version: _Optional[str] = ..., public_address: _Optional[str] = ..., metrics_url: _Optional[str] = ..., fingerprint: _Optional[str] = ..., away_seconds: _Optional[float] = ...) -> None: ...

class PoolStatus(_message.Message):
    __slots__ = ("pool", "model", "tensor_parallel", "load", "device", "replicas", "closed", "version", "trainer", "sync", "routing", "revision", "http_url", "limits", "paused_by", "asleep_by", "stepping", "https_port", "http_key")
    POOL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TRAINER_FIELD_NUMBER: _ClassVar[int]
    SYNC_FIELD_NUMBER: _ClassVar[int]
    ROUTING_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    HTTP_URL_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_BY_FIELD_NUMBER: _ClassVar[int]
    ASLEEP_BY_FIELD_NUMBER: _ClassVar[int]
    STEPPING_FIELD_NUMBER: _ClassVar[int]
    HTTPS_PORT_FIELD_NUMBER: _ClassVar[int]
    HTTP_KEY_FIELD_NUMBER: _ClassVar[int]
    pool: str
    model: str
    tensor_parallel: int
    load: str
    device: str
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaStatus]
    closed: bool
    version: int
    trainer: str
    sync: str
    routing: str
    revision: int
    http_url: str
    limits: CallLimits
    paused_by: str
    asleep_by: str
    stepping: bool
    https_port: int
    http_key: bool
    def __init__(self, pool: _Optional[str] = ..., model: _Optional[str] = ..., tensor_parallel: _Optional[int] = ..., load: _Optional[str] = ..., device: _Optional[str] = ..., replicas: _Optional[_Iterable[_Union[ReplicaStatus, _Mapping]]] = ..., closed: _Optional[bool] = ..., version: _Optional[int] = ..., trainer: _Optional[str] = ..., sync: _Optional[str] = ..., routing: _Optional[str] = ..., revision: _Optional[int] = ..., http_url: _Optional[str] = ..., limits: _Optional[_Union[CallLimits, _Mapping]] = ..., paused_by: _Optional[str] = ..., asleep_by: _Optional[str] = ..., stepping: _Optional[bool] = ..., https_port: _Optional[int] = ..., http_key: _Optional[bool] = ...) -> None: ...

class CallLimits(_message.Message):
    __slots__ = ("n", "prompts", "samples", "tokens")
    N_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    n: int
    prompts: int
    samples: int
    tokens: int
    def __init__(self, n: _Optional[int] = ..., prompts: _Optional[int] = ..., samples: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class ReplicaStatus(_message.Message):
    __slots__ = ("replica", "state", "stage", "seconds", "pid", "epoch", "cause", "log_tail", "facts", "stats", "routed", "beat_age", "stale", "dirty", "version", "served", "elsewhere", "deaths", "restarts_left", "restarts", "awaited")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    LOG_TAIL_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    ROUTED_FIELD_NUMBER: _ClassVar[int]
    BEAT_AGE_FIELD_NUMBER: _ClassVar[int]
    STALE_FIELD_NUMBER: _ClassVar[int]
    DIRTY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    DEATHS_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_LEFT_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    replica: str
    state: ReplicaState
    stage: str
    seconds: float
    pid: int
    epoch: int
    cause: str
    log_tail: str
    facts: EngineFacts
    stats: ReplicaStats
    routed: int
    beat_age: float
    stale: bool
    dirty: bool
    version: int
    served: int
    elsewhere: bool
    deaths: _containers.RepeatedScalarFieldContainer[str]
    restarts_left: int
    restarts: int
    awaited: bool
    def __init__(self, replica: _Optional[str] = ..., state: _Optional[_Union[ReplicaState, str]] = ..., stage: _Optional[str] = ..., seconds: _Optional[float] = ..., pid: _Optional[int] = ..., epoch: _Optional[int] = ..., cause: _Optional[str] = ..., log_tail: _Optional[str] = ..., facts: _Optional[_Union[EngineFacts, _Mapping]] = ..., stats: _Optional[_Union[ReplicaStats, _Mapping]] = ..., routed: _Optional[int] = ..., beat_age: _Optional[float] = ..., stale: _Optional[bool] = ..., dirty: _Optional[bool] = ..., version: _Optional[int] = ..., served: _Optional[int] = ..., elsewhere: _Optional[bool] = ..., deaths: _Optional[_Iterable[str]] = ..., restarts_left: _Optional[int] = ..., restarts: _Optional[int] = ..., awaited: _Optional[bool] = ...) -> None: ...

class EngineFacts(_message.Message):
    __slots__ = ("vllm_version", "vllm_build", "dtype", "max_model_len", "max_num_seqs", "logprobs_mode", "sampling_names", "vocab_size", "prefix_caching", "has_tokenizer", "pid", "architecture", "speculative", "draft_weights", "max_adapters", "block_size", "http_url", "host", "batch_invariant", "attention_backend", "graph_tokens", "quantization", "routed_experts", "vllm_warning", "draft_model")
    VLLM_VERSION_FIELD_NUMBER: _ClassVar[int]
    VLLM_BUILD_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_MODE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_NAMES_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHING_FIELD_NUMBER: _ClassVar[int]
    HAS_TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    MAX_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    HTTP_URL_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    BATCH_INVARIANT_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_BACKEND_FIELD_NUMBER: _ClassVar[int]
    GRAPH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    VLLM_WARNING_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MODEL_FIELD_NUMBER: _ClassVar[int]
    vllm_version: str
    vllm_build: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    logprobs_mode: str
    sampling_names: _containers.RepeatedScalarFieldContainer[str]
    vocab_size: int
    prefix_caching: bool
    has_tokenizer: bool
    pid: int
    architecture: str
    speculative: str
    draft_weights: bool
    max_adapters: int
    block_size: int
    http_url: str
    host: str
    batch_invariant: bool
    attention_backend: str
    graph_tokens: int
    quantization: str
    routed_experts: str
    vllm_warning: str
    draft_model: str
    def __init__(self, vllm_version: _Optional[str] = ..., vllm_build: _Optional[str] = ..., dtype: _Optional[str] = ..., max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., logprobs_mode: _Optional[str] = ..., sampling_names: _Optional[_Iterable[str]] = ..., vocab_size: _Optional[int] = ..., prefix_caching: _Optional[bool] = ..., has_tokenizer: _Optional[bool] = ..., pid: _Optional[int] = ..., architecture: _Optional[str] = ..., speculative: _Optional[str] = ..., draft_weights: _Optional[bool] = ..., max_adapters: _Optional[int] = ..., block_size: _Optional[int] = ..., http_url: _Optional[str] = ..., host: _Optional[str] = ..., batch_invariant: _Optional[bool] = ..., attention_backend: _Optional[str] = ..., graph_tokens: _Optional[int] = ..., quantization: _Optional[str] = ..., routed_experts: _Optional[str] = ..., vllm_warning: _Optional[str] = ..., draft_model: _Optional[str] = ...) -> None: ...

class DraftCount(_message.Message):
    __slots__ = ("version", "drafted", "accepted")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    version: int
    drafted: int
    accepted: int
    def __init__(self, version: _Optional[int] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ...) -> None: ...

class ReplicaStats(_message.Message):
    __slots__ = ("running", "waiting", "kv_use", "prefix_queries", "prefix_hits", "generated_tokens", "prompt_tokens", "tokens_per_s", "weight_version", "paused", "sleeping", "dirty", "draft_tokens", "accepted_tokens", "adapters", "draft_version", "drafts")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_USE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    SLEEPING_FIELD_NUMBER: _ClassVar[int]
    DIRTY_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_VERSION_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    kv_use: float
    prefix_queries: int
    prefix_hits: int
    generated_tokens: int
    prompt_tokens: int
    tokens_per_s: float
    weight_version: int
    paused: bool
    sleeping: bool
    dirty: bool
    draft_tokens: int
    accepted_tokens: int
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    draft_version: int
    drafts: _containers.RepeatedCompositeFieldContainer[DraftCount]
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., kv_use: _Optional[float] = ..., prefix_queries: _Optional[int] = ..., prefix_hits: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., weight_version: _Optional[int] = ..., paused: _Optional[bool] = ..., sleeping: _Optional[bool] = ..., dirty: _Optional[bool] = ..., draft_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., draft_version: _Optional[int] = ..., drafts: _Optional[_Iterable[_Union[DraftCount, _Mapping]]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("text", "chat_json", "tokens", "parts")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_JSON_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    text: str
    chat_json: str
    tokens: TokenIds
    parts: PromptParts
    def __init__(self, text: _Optional[str] = ..., chat_json: _Optional[str] = ..., tokens: _Optional[_Union[TokenIds, _Mapping]] = ..., parts: _Optional[_Union[PromptParts, _Mapping]] = ...) -> None: ...

class PromptParts(_message.Message):
    __slots__ = ("parts",)
    PARTS_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[Prompt]
    def __init__(self, parts: _Optional[_Iterable[_Union[Prompt, _Mapping]]] = ...) -> None: ...

class GenerateCall(_message.Message):
    __slots__ = ("start", "credit")
    START_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    start: GenerateStart
    credit: int
    def __init__(self, start: _Optional[_Union[GenerateStart, _Mapping]] = ..., credit: _Optional[int] = ...) -> None: ...

class GenerateStart(_message.Message):
    __slots__ = ("pool", "prompts", "n", "sampling_json", "window", "routing", "min_version", "home", "adapter", "settles")
    POOL_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_JSON_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    ROUTING_FIELD_NUMBER: _ClassVar[int]
    MIN_VERSION_FIELD_NUMBER: _ClassVar[int]
    HOME_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SETTLES_FIELD_NUMBER: _ClassVar[int]
    pool: str
    prompts: _containers.RepeatedCompositeFieldContainer[Prompt]
    n: int
    sampling_json: str
    window: int
    routing: str
    min_version: int
    home: str
    adapter: str
    settles: bool
    def __init__(self, pool: _Optional[str] = ..., prompts: _Optional[_Iterable[_Union[Prompt, _Mapping]]] = ..., n: _Optional[int] = ..., sampling_json: _Optional[str] = ..., window: _Optional[int] = ..., routing: _Optional[str] = ..., min_version: _Optional[int] = ..., home: _Optional[str] = ..., adapter: _Optional[str] = ..., settles: _Optional[bool] = ...) -> None: ...

class GenerateEvent(_message.Message):
    __slots__ = ("samples", "notes", "lost")
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    notes: _containers.RepeatedScalarFieldContainer[str]
    lost: str
    def __init__(self, samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ..., notes: _Optional[_Iterable[str]] = ..., lost: _Optional[str] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("version", "start", "stop")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    version: int
    start: int
    stop: int
    def __init__(self, version: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("prompt_index", "sample_index", "text", "token_ids", "logprobs", "finish_reason", "versions", "replica", "retried", "queued_seconds", "first_token_seconds", "total_seconds", "error", "prompt_token_ids", "cached_tokens", "adapter", "expert_ids", "expert_weights", "expert_layers", "experts_chosen")
    PROMPT_INDEX_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    RETRIED_FIELD_NUMBER: _ClassVar[int]
    QUEUED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    EXPERT_IDS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_LAYERS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_CHOSEN_FIELD_NUMBER: _ClassVar[int]
    prompt_index: int
    sample_index: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    finish_reason: str
    versions: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    replica: str
    retried: int
    queued_seconds: float
    first_token_seconds: float
    total_seconds: float
    error: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    cached_tokens: int
    adapter: Adapter
    expert_ids: bytes
    expert_weights: bytes
    expert_layers: int
    experts_chosen: int
    def __init__(self, prompt_index: _Optional[int] = ..., sample_index: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., finish_reason: _Optional[str] = ..., versions: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., replica: _Optional[str] = ..., retried: _Optional[int] = ..., queued_seconds: _Optional[float] = ..., first_token_seconds: _Optional[float] = ..., total_seconds: _Optional[float] = ..., error: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., cached_tokens: _Optional[int] = ..., adapter: _Optional[_Union[Adapter, _Mapping]] = ..., expert_ids: _Optional[bytes] = ..., expert_weights: _Optional[bytes] = ..., expert_layers: _Optional[int] = ..., experts_chosen: _Optional[int] = ...) -> None: ...

class ScoreCall(_message.Message):
    __slots__ = ("pool", "sequences", "top")
    POOL_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    pool: str
    sequences: _containers.RepeatedCompositeFieldContainer[TokenIds]
    top: int
    def __init__(self, pool: _Optional[str] = ..., sequences: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., top: _Optional[int] = ...) -> None: ...

class Scored(_message.Message):
    __slots__ = ("index", "logprobs", "top_ids", "top_logprobs", "weight_version", "replica")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    index: int
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    weight_version: int
    replica: str
    def __init__(self, index: _Optional[int] = ..., logprobs: _Optional[_Iterable[float]] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., weight_version: _Optional[int] = ..., replica: _Optional[str] = ...) -> None: ...

class ScoreEvent(_message.Message):
    __slots__ = ("scored",)
    SCORED_FIELD_NUMBER: _ClassVar[int]
    scored: _containers.RepeatedCompositeFieldContainer[Scored]
    def __init__(self, scored: _Optional[_Iterable[_Union[Scored, _Mapping]]] = ...) -> None: ...

class SteerCall(_message.Message):
    __slots__ = ("pool", "what", "mode", "level", "tags", "clear_cache", "by")
    POOL_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    CLEAR_CACHE_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    pool: str
    what: Steering
    mode: str
    level: int
    tags: _containers.RepeatedScalarFieldContainer[str]
    clear_cache: bool
    by: str
    def __init__(self, pool: _Optional[str] = ..., what: _Optional[_Union[Steering, str]] = ..., mode: _Optional[str] = ..., level: _Optional[int] = ..., tags: _Optional[_Iterable[str]] = ..., clear_cache: _Optional[bool] = ..., by: _Optional[str] = ...) -> None: ...

class SteerReply(_message.Message):
    __slots__ = ("seconds",)
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    def __init__(self, seconds: _Optional[float] = ...) -> None: ...

class TraceTensor(_message.Message):
    __slots__ = ("name", "shape", "dtype")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ...) -> None: ...

class TraceCall(_message.Message):
    __slots__ = ("pool", "tensors", "replica")
    POOL_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    pool: str
    tensors: _containers.RepeatedCompositeFieldContainer[TraceTensor]
    replica: str
    def __init__(self, pool: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[TraceTensor, _Mapping]]] = ..., replica: _Optional[str] = ...) -> None: ...

class TraceEvent(_message.Message):
    __slots__ = ("layout",)
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    layout: bytes
    def __init__(self, layout: _Optional[bytes] = ...) -> None: ...

class LogsRequest(_message.Message):
    __slots__ = ("pool", "replica", "lines")
    POOL_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    pool: str
    replica: str
    lines: int
    def __init__(self, pool: _Optional[str] = ..., replica: _Optional[str] = ..., lines: _Optional[int] = ...) -> None: ...

class LogsReply(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("replica", "address", "facts", "stats", "tls_pem", "tls_name", "run")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    TLS_PEM_FIELD_NUMBER: _ClassVar[int]
    TLS_NAME_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    replica: str
    address: str
    facts: EngineFacts
    stats: ReplicaStats
    tls_pem: str
    tls_name: str
    run: int
    def __init__(self, replica: _Optional[str] = ..., address: _Optional[str] = ..., facts: _Optional[_Union[EngineFacts, _Mapping]] = ..., stats: _Optional[_Union[ReplicaStats, _Mapping]] = ..., tls_pem: _Optional[str] = ..., tls_name: _Optional[str] = ..., run: _Optional[int] = ...) -> None: ...

class JoinReport(_message.Message):
    __slots__ = ("offer", "pid", "news", "exited")
    OFFER_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NEWS_FIELD_NUMBER: _ClassVar[int]
    EXITED_FIELD_NUMBER: _ClassVar[int]
    offer: JoinOffer
    pid: int
    news: JoinNews
    exited: str
    def __init__(self, offer: _Optional[_Union[JoinOffer, _Mapping]] = ..., pid: _Optional[int] = ..., news: _Optional[_Union[JoinNews, _Mapping]] = ..., exited: _Optional[str] = ...) -> None: ...

class JoinOffer(_message.Message):
    __slots__ = ("name", "agent", "running")
    NAME_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    name: str
    agent: str
    running: str
    def __init__(self, name: _Optional[str] = ..., agent: _Optional[str] = ..., running: _Optional[str] = ...) -> None: ...

class JoinNews(_message.Message):
    __slots__ = ("stage", "log_tail")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    LOG_TAIL_FIELD_NUMBER: _ClassVar[int]
    stage: str
    log_tail: str
    def __init__(self, stage: _Optional[str] = ..., log_tail: _Optional[str] = ...) -> None: ...

class JoinOrder(_message.Message):
    __slots__ = ("start_json", "end", "wait")
    START_JSON_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    start_json: str
    end: bool
    wait: bool
    def __init__(self, start_json: _Optional[str] = ..., end: _Optional[bool] = ..., wait: _Optional[bool] = ...) -> None: ...

class RegisterReply(_message.Message):
    __slots__ = ("epoch", "beat_seconds")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    beat_seconds: float
    def __init__(self, epoch: _Optional[int] = ..., beat_seconds: _Optional[float] = ...) -> None: ...

class BeatRequest(_message.Message):
    __slots__ = ("replica", "epoch", "stats")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    replica: str
    epoch: int
    stats: ReplicaStats
    def __init__(self, replica: _Optional[str] = ..., epoch: _Optional[int] = ..., stats: _Optional[_Union[ReplicaStats, _Mapping]] = ...) -> None: ...

class BeatReply(_message.Message):
    __slots__ = ("fenced",)
    FENCED_FIELD_NUMBER: _ClassVar[int]
    fenced: bool
    def __init__(self, fenced: _Optional[bool] = ...) -> None: ...

class EpochRequest(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class PromptWork(_message.Message):
    __slots__ = ("prompt_index", "prompt", "sample_indexes")
    PROMPT_INDEX_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEXES_FIELD_NUMBER: _ClassVar[int]
    prompt_index: int
    prompt: Prompt
    sample_indexes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, prompt_index: _Optional[int] = ..., prompt: _Optional[_Union[Prompt, _Mapping]] = ..., sample_indexes: _Optional[_Iterable[int]] = ...) -> None: ...

class RolloutRequest(_message.Message):
    __slots__ = ("epoch", "work", "sampling_json", "adapter")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_JSON_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    work: _containers.RepeatedCompositeFieldContainer[PromptWork]
    sampling_json: str
    adapter: Adapter
    def __init__(self, epoch: _Optional[int] = ..., work: _Optional[_Iterable[_Union[PromptWork, _Mapping]]] = ..., sampling_json: _Optional[str] = ..., adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "version", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: int
    path: str
    def __init__(self, name: _Optional[str] = ..., version: _Optional[int] = ..., path: _Optional[str] = ...) -> None: ...

class AdapterCall(_message.Message):
    __slots__ = ("pool", "adapter", "unload")
    POOL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    UNLOAD_FIELD_NUMBER: _ClassVar[int]
    pool: str
    adapter: Adapter
    unload: bool
    def __init__(self, pool: _Optional[str] = ..., adapter: _Optional[_Union[Adapter, _Mapping]] = ..., unload: _Optional[bool] = ...) -> None: ...

class RolloutAdapterRequest(_message.Message):
    __slots__ = ("epoch", "adapter", "unload")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    UNLOAD_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    adapter: Adapter
    unload: bool
    def __init__(self, epoch: _Optional[int] = ..., adapter: _Optional[_Union[Adapter, _Mapping]] = ..., unload: _Optional[bool] = ...) -> None: ...

class SampleBatch(_message.Message):
    __slots__ = ("samples",)
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    def __init__(self, samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ...) -> None: ...

class RolloutScoreRequest(_message.Message):
    __slots__ = ("epoch", "sequences", "indexes", "top")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequences: _containers.RepeatedCompositeFieldContainer[TokenIds]
    indexes: _containers.RepeatedScalarFieldContainer[int]
    top: int
    def __init__(self, epoch: _Optional[int] = ..., sequences: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., indexes: _Optional[_Iterable[int]] = ..., top: _Optional[int] = ...) -> None: ...

class ScoreBatch(_message.Message):
    __slots__ = ("scored",)
    SCORED_FIELD_NUMBER: _ClassVar[int]
    scored: _containers.RepeatedCompositeFieldContainer[Scored]
    def __init__(self, scored: _Optional[_Iterable[_Union[Scored, _Mapping]]] = ...) -> None: ...

class RolloutSteerRequest(_message.Message):
    __slots__ = ("epoch", "order")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    order: SteerCall
    def __init__(self, epoch: _Optional[int] = ..., order: _Optional[_Union[SteerCall, _Mapping]] = ...) -> None: ...

class RolloutTraceRequest(_message.Message):
    __slots__ = ("epoch", "tensors")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    tensors: _containers.RepeatedCompositeFieldContainer[TraceTensor]
    def __init__(self, epoch: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TraceTensor, _Mapping]]] = ...) -> None: ...

class LinkOrder(_message.Message):
    __slots__ = ("number", "seconds", "open", "steps")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    number: int
    seconds: float
    open: LinkOpen
    steps: SyncSteps
    def __init__(self, number: _Optional[int] = ..., seconds: _Optional[float] = ..., open: _Optional[_Union[LinkOpen, _Mapping]] = ..., steps: _Optional[_Union[SyncSteps, _Mapping]] = ...) -> None: ...

class LinkOpen(_message.Message):
    __slots__ = ("pool", "holder", "transport", "plan", "endpoints", "lease_seconds")
    POOL_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    pool: str
    holder: str
    transport: str
    plan: bytes
    endpoints: _containers.RepeatedCompositeFieldContainer[Endpoint]
    lease_seconds: float
    def __init__(self, pool: _Optional[str] = ..., holder: _Optional[str] = ..., transport: _Optional[str] = ..., plan: _Optional[bytes] = ..., endpoints: _Optional[_Iterable[_Union[Endpoint, _Mapping]]] = ..., lease_seconds: _Optional[float] = ...) -> None: ...

class Endpoint(_message.Message):
    __slots__ = ("replica", "index", "ranks_json")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    RANKS_JSON_FIELD_NUMBER: _ClassVar[int]
    replica: str
    index: int
    ranks_json: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, replica: _Optional[str] = ..., index: _Optional[int] = ..., ranks_json: _Optional[_Iterable[str]] = ...) -> None: ...

class SyncTerms(_message.Message):
    __slots__ = ("version", "mode", "verify", "require", "pause", "kv", "bucket_seconds", "replicas", "stepped", "base", "mark")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    REQUIRE_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    BUCKET_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    STEPPED_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    version: int
    mode: str
    verify: str
    require: str
    pause: str
    kv: str
    bucket_seconds: float
    replicas: _containers.RepeatedScalarFieldContainer[str]
    stepped: bool
    base: str
    mark: str
    def __init__(self, version: _Optional[int] = ..., mode: _Optional[str] = ..., verify: _Optional[str] = ..., require: _Optional[str] = ..., pause: _Optional[str] = ..., kv: _Optional[str] = ..., bucket_seconds: _Optional[float] = ..., replicas: _Optional[_Iterable[str]] = ..., stepped: _Optional[bool] = ..., base: _Optional[str] = ..., mark: _Optional[str] = ...) -> None: ...

class SyncSteps(_message.Message):
    __slots__ = ("phases", "terms", "digests", "nonfinite", "call")
    PHASES_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    NONFINITE_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    phases: _containers.RepeatedScalarFieldContainer[SyncPhase]
    terms: SyncTerms
    digests: _containers.RepeatedCompositeFieldContainer[ReplicaDigests]
    nonfinite: bool
    call: str
    def __init__(self, phases: _Optional[_Iterable[_Union[SyncPhase, str]]] = ..., terms: _Optional[_Union[SyncTerms, _Mapping]] = ..., digests: _Optional[_Iterable[_Union[ReplicaDigests, _Mapping]]] = ..., nonfinite: _Optional[bool] = ..., call: _Optional[str] = ...) -> None: ...

class ReplicaDigests(_message.Message):
    __slots__ = ("replica", "parameters", "ranks", "values")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    replica: str
    parameters: _containers.RepeatedScalarFieldContainer[str]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    values: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, replica: _Optional[str] = ..., parameters: _Optional[_Iterable[str]] = ..., ranks: _Optional[_Iterable[int]] = ..., values: _Optional[_Iterable[int]] = ...) -> None: ...

class PhaseSeconds(_message.Message):
    __slots__ = ("name", "seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    seconds: float
    def __init__(self, name: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class ReplicaOutcome(_message.Message):
    __slots__ = ("replica", "state", "version", "seconds", "failed", "error", "found", "differing", "bytes", "kind", "exports_json", "core_channel", "evidence", "reloaded")
    class EvidenceEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class ReloadedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    DIFFERING_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    EXPORTS_JSON_FIELD_NUMBER: _ClassVar[int]
    CORE_CHANNEL_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    RELOADED_FIELD_NUMBER: _ClassVar[int]
    replica: str
    state: str
    version: int
    seconds: _containers.RepeatedCompositeFieldContainer[PhaseSeconds]
    failed: str
    error: str
    found: ReplicaDigests
    differing: _containers.RepeatedScalarFieldContainer[str]
    bytes: int
    kind: str
    exports_json: _containers.RepeatedScalarFieldContainer[str]
    core_channel: _containers.RepeatedScalarFieldContainer[str]
    evidence: _containers.ScalarMap[str, int]
    reloaded: _containers.ScalarMap[str, float]
    def __init__(self, replica: _Optional[str] = ..., state: _Optional[str] = ..., version: _Optional[int] = ..., seconds: _Optional[_Iterable[_Union[PhaseSeconds, _Mapping]]] = ..., failed: _Optional[str] = ..., error: _Optional[str] = ..., found: _Optional[_Union[ReplicaDigests, _Mapping]] = ..., differing: _Optional[_Iterable[str]] = ..., bytes: _Optional[int] = ..., kind: _Optional[str] = ..., exports_json: _Optional[_Iterable[str]] = ..., core_channel: _Optional[_Iterable[str]] = ..., evidence: _Optional[_Mapping[str, int]] = ..., reloaded: _Optional[_Mapping[str, float]] = ...) -> None: ...

class LinkReply(_message.Message):
    __slots__ = ("number", "code", "error", "remedy", "state", "outcomes", "holder")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    number: int
    code: str
    error: str
    remedy: str
    state: str
    outcomes: _containers.RepeatedCompositeFieldContainer[ReplicaOutcome]
    holder: str
    def __init__(self, number: _Optional[int] = ..., code: _Optional[str] = ..., error: _Optional[str] = ..., remedy: _Optional[str] = ..., state: _Optional[str] = ..., outcomes: _Optional[_Iterable[_Union[ReplicaOutcome, _Mapping]]] = ..., holder: _Optional[str] = ...) -> None: ...

class RolloutSyncRequest(_message.Message):
    __slots__ = ("epoch", "link", "phases", "terms", "digests", "open", "close", "seconds", "call", "nonfinite")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    TERMS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    NONFINITE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    link: str
    phases: _containers.RepeatedScalarFieldContainer[SyncPhase]
    terms: SyncTerms
    digests: ReplicaDigests
    open: RolloutOpen
    close: bool
    seconds: float
    call: str
    nonfinite: bool
    def __init__(self, epoch: _Optional[int] = ..., link: _Optional[str] = ..., phases: _Optional[_Iterable[_Union[SyncPhase, str]]] = ..., terms: _Optional[_Union[SyncTerms, _Mapping]] = ..., digests: _Optional[_Union[ReplicaDigests, _Mapping]] = ..., open: _Optional[_Union[RolloutOpen, _Mapping]] = ..., close: _Optional[bool] = ..., seconds: _Optional[float] = ..., call: _Optional[str] = ..., nonfinite: _Optional[bool] = ...) -> None: ...

class RolloutOpen(_message.Message):
    __slots__ = ("transport", "plan", "index", "ranks_json")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    RANKS_JSON_FIELD_NUMBER: _ClassVar[int]
    transport: str
    plan: bytes
    index: int
    ranks_json: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, transport: _Optional[str] = ..., plan: _Optional[bytes] = ..., index: _Optional[int] = ..., ranks_json: _Optional[_Iterable[str]] = ...) -> None: ...

class RolloutSyncReply(_message.Message):
    __slots__ = ("outcome",)
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    outcome: ReplicaOutcome
    def __init__(self, outcome: _Optional[_Union[ReplicaOutcome, _Mapping]] = ...) -> None: ...

class PeekCall(_message.Message):
    __slots__ = ("pool", "replica", "rank", "parameter")
    POOL_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_FIELD_NUMBER: _ClassVar[int]
    pool: str
    replica: str
    rank: int
    parameter: str
    def __init__(self, pool: _Optional[str] = ..., replica: _Optional[str] = ..., rank: _Optional[int] = ..., parameter: _Optional[str] = ...) -> None: ...

class RolloutPeekRequest(_message.Message):
    __slots__ = ("epoch", "rank", "parameter")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    rank: int
    parameter: str
    def __init__(self, epoch: _Optional[int] = ..., rank: _Optional[int] = ..., parameter: _Optional[str] = ...) -> None: ...

class PeekEvent(_message.Message):
    __slots__ = ("piece",)
    PIECE_FIELD_NUMBER: _ClassVar[int]
    piece: bytes
    def __init__(self, piece: _Optional[bytes] = ...) -> None: ...

class HiddenCall(_message.Message):
    __slots__ = ("pool", "replica", "tokens")
    POOL_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    pool: str
    replica: str
    tokens: TokenIds
    def __init__(self, pool: _Optional[str] = ..., replica: _Optional[str] = ..., tokens: _Optional[_Union[TokenIds, _Mapping]] = ...) -> None: ...

class RolloutHiddenRequest(_message.Message):
    __slots__ = ("epoch", "tokens")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    tokens: TokenIds
    def __init__(self, epoch: _Optional[int] = ..., tokens: _Optional[_Union[TokenIds, _Mapping]] = ...) -> None: ...

class HiddenEvent(_message.Message):
    __slots__ = ("layer", "piece")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    PIECE_FIELD_NUMBER: _ClassVar[int]
    layer: int
    piece: bytes
    def __init__(self, layer: _Optional[int] = ..., piece: _Optional[bytes] = ...) -> None: ...

class RestartRequest(_message.Message):
    __slots__ = ("pool", "replica")
    POOL_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    pool: str
    replica: str
    def __init__(self, pool: _Optional[str] = ..., replica: _Optional[str] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("pool", "replicas")
    POOL_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    pool: str
    replicas: int
    def __init__(self, pool: _Optional[str] = ..., replicas: _Optional[int] = ...) -> None: ...

class TeamMessage(_message.Message):
    __slots__ = ("join", "payload", "to_all")
    JOIN_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    TO_ALL_FIELD_NUMBER: _ClassVar[int]
    join: TeamJoin
    payload: bytes
    to_all: bool
    def __init__(self, join: _Optional[_Union[TeamJoin, _Mapping]] = ..., payload: _Optional[bytes] = ..., to_all: _Optional[bool] = ...) -> None: ...

class TeamJoin(_message.Message):
    __slots__ = ("pool", "team", "member", "size", "name")
    POOL_FIELD_NUMBER: _ClassVar[int]
    TEAM_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    pool: str
    team: str
    member: int
    size: int
    name: str
    def __init__(self, pool: _Optional[str] = ..., team: _Optional[str] = ..., member: _Optional[int] = ..., size: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class TeamEvent(_message.Message):
    __slots__ = ("roll", "delivery", "over")
    ROLL_FIELD_NUMBER: _ClassVar[int]
    DELIVERY_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    roll: TeamRoll
    delivery: TeamDelivery
    over: str
    def __init__(self, roll: _Optional[_Union[TeamRoll, _Mapping]] = ..., delivery: _Optional[_Union[TeamDelivery, _Mapping]] = ..., over: _Optional[str] = ...) -> None: ...

class TeamRoll(_message.Message):
    __slots__ = ("names", "complete")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    complete: bool
    def __init__(self, names: _Optional[_Iterable[str]] = ..., complete: _Optional[bool] = ...) -> None: ...

class TeamDelivery(_message.Message):
    __slots__ = ("member", "payload")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    member: int
    payload: bytes
    def __init__(self, member: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...
