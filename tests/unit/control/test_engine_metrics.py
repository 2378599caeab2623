from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from warmfront.control.engine_metrics import EngineMetrics, RankMetrics, parse

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "vllm"


def recorded(name: str) -> EngineMetrics:
    return parse((FIXTURES / name).read_text(encoding="utf-8"))


def test_a_busy_scrape_gives_load_and_capacity() -> None:
    metrics = recorded("metrics.txt")
    assert metrics.engine == "vllm"
    assert metrics.started_s == pytest.approx(1796021785.43)
    assert metrics.ranks == {
        0: RankMetrics(
            running=3.0,
            waiting=2.0,
            kv_usage=pytest.approx(27 / 39),
            prefix_queries=62243.0,
            prefix_hits=7936.0,
            prompt_tokens=61303.0,
            generated_tokens=3819.0,
            block_size=128,
            capacity_tokens=5120 - 128,
            prefix_caching=True,
        )
    }
    assert metrics.ranks[0].worked_tokens == 62243.0 + 61303.0 + 3819.0


def test_capacity_leaves_out_the_null_block_so_usage_is_a_share_of_it() -> None:
    rank = recorded("metrics.txt").ranks[0]
    assert rank.kv_usage is not None
    assert rank.capacity_tokens is not None
    used_blocks = rank.kv_usage * rank.capacity_tokens / 128
    assert used_blocks == pytest.approx(round(used_blocks))


def test_two_ranks_behind_one_url_have_a_row_and_a_capacity_each() -> None:
    metrics = recorded("metrics_dp2.txt")
    assert sorted(metrics.ranks) == [0, 1]
    assert [rank.capacity_tokens for rank in metrics.ranks.values()] == [8192 - 128] * 2


def test_without_the_token_count_the_blocks_of_a_server_are_shared_by_its_ranks() -> None:
    text = (FIXTURES / "metrics_dp2.txt").read_text(encoding="utf-8").replace('kv_cache_size_tokens="8192"', "")
    assert [rank.capacity_tokens for rank in parse(text).ranks.values()] == [(128 // 2 - 1) * 128] * 2


def test_the_name_of_kv_usage_before_0_12_is_understood() -> None:
    assert parse('vllm:gpu_cache_usage_perc{engine="0"} 0.5\n').ranks[0].kv_usage == 0.5


def test_a_page_of_another_engine_gives_nothing() -> None:
    assert parse("# HELP up\nup 1\nllamacpp:requests_processing 2\n") == EngineMetrics()


def test_values_that_are_no_numbers_are_skipped() -> None:
    page = 'vllm:num_requests_running{engine="0"} NaN\nvllm:num_requests_waiting{engine="0"} 1.0\n'
    assert parse(page).ranks == {0: RankMetrics(waiting=1.0)}


def test_braces_and_quotes_in_label_values_do_not_end_the_labels() -> None:
    page = 'vllm:num_requests_running{model_name="a}\\" 7 {",engine="1"} 4\n'
    assert parse(page).ranks == {1: RankMetrics(running=4.0)}


def test_a_value_of_none_as_text_is_not_known() -> None:
    page = 'vllm:cache_config_info{block_size="None",num_gpu_blocks="None",engine="0"} 1.0\n'
    assert parse(page).ranks[0] == RankMetrics()


@given(st.text(alphabet='vllm:num_requests_running{engine="0"} 1.5\n#NaN', max_size=300))
def test_no_page_makes_the_reader_fail(text: str) -> None:
    parse(text)
    parse("vllm:num_requests_running" + text)
