"""vLLM 0.9.2 and later (V1 engine).

Source: docs/reference/engines.md; the metric names are those of 0.32 with the older ones behind them.
"""

from warmfront.engines.dialect import CacheLabels, Dialect, EventDefaults, MetricNames

VLLM = Dialect(
    name="vllm",
    version_path="/version",
    recognized_by=("vllm:",),
    metrics=MetricNames(
        running=("vllm:num_requests_running",),
        waiting=("vllm:num_requests_waiting",),
        kv_usage=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        prefix_queries=("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
        prefix_hits=("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
        prompt_tokens=("vllm:prompt_tokens_total",),
        generated_tokens=("vllm:generation_tokens_total",),
        preemptions=("vllm:num_preemptions_total",),
        cache_info=("vllm:cache_config_info",),
        rank_label="engine",
        model_label="model_name",
    ),
    cache_labels=CacheLabels(
        block_size=("block_size",),
        capacity_tokens=("kv_cache_size_tokens",),
        blocks=("num_gpu_blocks",),
        blocks_reserved=1,  # the null block
        prefix_caching=("enable_prefix_caching",),
    ),
    events=EventDefaults(sources_path="/kv_event_sources", port=5557),
    rank_header="X-data-parallel-rank",
    rank_header_ignored_by=("/v1/responses", "/pooling"),
    cached_tokens_fields=(
        ("prompt_tokens_details", "cached_tokens"),
        ("input_tokens_details", "cached_tokens"),
        ("cache_read_input_tokens",),
    ),
    model_directory_field="root",
    context_length_field="max_model_len",
)
