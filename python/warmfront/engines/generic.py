"""Any server that speaks the OpenAI API: routed by our own dispatches and load, since it tells nothing else."""

from warmfront.engines.dialect import Dialect

GENERIC = Dialect(
    name="generic",
    health_path="/v1/models",
    metrics_path=None,
    cached_tokens_fields=(
        ("prompt_tokens_details", "cached_tokens"),
        ("input_tokens_details", "cached_tokens"),
        ("cache_read_input_tokens",),
    ),
    context_length_field="max_model_len",
)
