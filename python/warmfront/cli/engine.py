"""`warmfront engine`: an engine server without a GPU."""

from __future__ import annotations

import asyncio
import os

import click

from warmfront.errors import ConfigError
from warmfront.obs import logs
from warmfront.sim.engine import EngineConfig
from warmfront.sim.latency import PRESETS, preset
from warmfront.sim.server.app import ServedModel, ServerOptions
from warmfront.sim.server.publisher import EventSocketError, PublisherConfig
from warmfront.sim.server.service import Service, serve_until_signal
from warmfront.sim.tokens import MODEL_DIRECTORY

POSITIVE = click.IntRange(min=1)


@click.command("engine", short_help="Run an OpenAI-compatible engine server without a GPU.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0 takes a free one."
)
@click.option("--preset", "preset_name", default="demo", show_default=True, metavar="NAME|FILE",
              help=f"Model and GPU whose speed and KV cache size to take: {', '.join(sorted(PRESETS))}, or a file of "
                   "`warmfront calibrate --save`.")  # fmt: skip
@click.option("--speed", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True,
              help="How many times as fast as the preset.")  # fmt: skip
@click.option(
    "--served-model-name", "names", multiple=True, help="Name clients use; repeatable, the first is answered."
)
@click.option("--lora-modules", "adapters", multiple=True, metavar="NAME=PATH", help="LoRA adapter; repeatable.")
@click.option("--block-size", type=POSITIVE, default=16, show_default=True, help="Tokens a KV block.")
@click.option(
    "--num-gpu-blocks-override", "blocks", type=click.IntRange(min=2), help="KV blocks; default from the preset."
)
@click.option(
    "--max-model-len", type=POSITIVE, default=8192, show_default=True, help="Prompt and answer together, in tokens."
)
@click.option("--max-num-seqs", type=POSITIVE, help="Sequences in one step; default from the preset.")
@click.option("--max-num-batched-tokens", type=POSITIVE, help="Tokens in one step; default from the preset.")
@click.option(
    "--max-num-queued-reqs", type=click.IntRange(min=0), help="Answer 503 beyond this many waiting; default: never."
)
@click.option("--kv-events/--no-kv-events", default=True, show_default=True, help="Publish KV events over ZMQ.")
@click.option(
    "--kv-events-endpoint",
    default="tcp://127.0.0.1:5557",
    show_default=True,
    help="PUB socket; port 0 takes a free one.",
)
@click.option(
    "--kv-events-replay-endpoint",
    default="tcp://127.0.0.1:5558",
    show_default=True,
    help="ROUTER socket; port 0 takes a free one.",
)
@click.option("--kv-events-topic", default="", help="First frame of every message.")
@click.option(
    "--kv-events-buffer-steps", type=POSITIVE, default=10_000, show_default=True, help="Batches kept for replay."
)
@click.option("--prompt-tokens-details/--no-prompt-tokens-details", default=True, show_default=True,
              help="Tell cached tokens in usage.")  # fmt: skip
@click.option("--enable-log-requests", "logs_requests", is_flag=True, help="Log the id of every request taken.")
@click.option("--seed", default=0, show_default=True, help="Seed of the made-up answers.")
@click.option("--hash-seed", help="Seed of the block hashes; default: random in each process.")
def command(
    host: str,
    port: int,
    preset_name: str,
    speed: float,
    names: tuple[str, ...],
    adapters: tuple[str, ...],
    block_size: int,
    blocks: int | None,
    max_model_len: int,
    max_num_seqs: int | None,
    max_num_batched_tokens: int | None,
    max_num_queued_reqs: int | None,
    kv_events: bool,
    kv_events_endpoint: str,
    kv_events_replay_endpoint: str,
    kv_events_topic: str,
    kv_events_buffer_steps: int,
    prompt_tokens_details: bool,
    logs_requests: bool,
    seed: int,
    hash_seed: str | None,
) -> None:
    """Run an engine server that behaves as vLLM does, as far as a router can see, without a GPU.

    Answers are made-up text; their timing comes from a latency model. Prints its base URL once it is ready. The model
    is a small built-in one, and its directory is what /v1/models tells as root.
    """
    try:
        chosen = preset(preset_name, speed=speed)
        engine = EngineConfig(
            latency=chosen.latency,
            blocks=blocks or 1 + chosen.kv_tokens // block_size,
            block_size=block_size,
            max_model_tokens=max_model_len,
            max_batched_tokens=max_num_batched_tokens or chosen.max_batched_tokens,
            max_sequences=max_num_seqs or chosen.max_sequences,
        )
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    events = PublisherConfig(
        endpoint=kv_events_endpoint,
        replay_endpoint=kv_events_replay_endpoint,
        topic=kv_events_topic,
        buffer_steps=kv_events_buffer_steps,
    )
    service = Service(
        engine=engine,
        model=ServedModel(names or (str(MODEL_DIRECTORY),), dict(_adapter(text) for text in adapters)),
        options=ServerOptions(
            queued_requests_max=max_num_queued_reqs,
            prompt_tokens_details=prompt_tokens_details,
            logs_requests=logs_requests,
            seed=seed,
            hash_seed=os.urandom(16) if hash_seed is None else hash_seed.encode()[:64],
        ),
        host=host,
        port=port,
        events=events if kv_events else None,
    )
    if logs_requests:
        logs.configure("info")
    try:
        asyncio.run(serve_until_signal(service, click.echo))
    except (OSError, EventSocketError) as error:
        raise click.ClickException(f"{error}; --port 0 and tcp://…:0 take free ports") from error


def _adapter(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not name or not equals:
        raise click.UsageError(f"--lora-modules {text}: expected NAME=PATH")
    return name, path
