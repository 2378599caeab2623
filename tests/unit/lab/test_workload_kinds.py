"""Each kind of workload is what it is named for: how much is shared, how it comes, how long it is."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from statistics import fmean, pstdev
from typing import Any

import pytest
from warmfront.lab.jobs import Job, count, cut
from warmfront.lab.model import SimRequest
from warmfront.lab.traces.summary import Summary, summarise
from warmfront.lab.workloads import KINDS, Draw, read

LOAD = 10.0


def jobs(kind: str, *, requests: int = 1000, seed: int = 0, load: float = LOAD, **parameters: Any) -> list[Job]:
    draw = Draw(seed=seed, load=load, requests=requests)
    return list(read({"kind": kind, **parameters}).limited_jobs(draw))


def figures(made: list[Job]) -> Summary:
    return summarise(made, 64)


def replayed(kind: str, *, answer_s: float = 1.0, requests: int = 500, **parameters: Any) -> list[SimRequest]:
    """Every request of a run in which each answer takes `answer_s`."""
    source = read({"kind": kind, **parameters}).source(Draw(seed=0, load=LOAD, requests=requests))
    sent = list(source.arrivals())
    for request in sent:  # grows while it is read
        sent += source.finished(request, request.at_s + answer_s)
    return sent


ALONE = sorted(name for name in KINDS if KINDS[name].clock != "own" and name not in ("mixture", "phases"))


@pytest.mark.parametrize("kind", [*ALONE, "mooncake", "azure"])
def test_a_seed_makes_the_same_workload_again_and_another_seed_another(kind: str) -> None:
    first = jobs(kind, requests=200)
    assert jobs(kind, requests=200) == first
    if kind not in ("mooncake", "azure"):
        assert jobs(kind, requests=200, seed=1) != first


@pytest.mark.parametrize("kind", [*ALONE, "mooncake", "azure"])
def test_a_workload_has_as_many_requests_as_were_asked_for(kind: str) -> None:
    assert len(replayed(kind, requests=333)) == 333


@pytest.mark.parametrize("kind", ALONE)
def test_a_higher_load_changes_times_and_not_contents(kind: str) -> None:
    slow, fast = jobs(kind, requests=100, load=1.0), jobs(kind, requests=100, load=4.0)
    if kind != "churn":
        assert [job.steps for job in slow] == [job.steps for job in fast]
    assert [job.at_s for job in slow] == pytest.approx([4 * job.at_s for job in fast])


@pytest.mark.parametrize("kind", ALONE)
def test_what_a_session_says_does_not_depend_on_how_fast_it_is_answered(kind: str) -> None:
    def contents(sent: list[SimRequest]) -> Counter[Any]:
        return Counter((request.session, request.turn, request.prompt, request.output_tokens) for request in sent)

    assert contents(replayed(kind, answer_s=0.1)) == contents(replayed(kind, answer_s=60.0))


def test_cutting_a_job_keeps_parents_before_children() -> None:
    (job,) = jobs("fan_out", requests=7)
    for limit in range(1, 8):
        kept = cut(job.steps, limit)
        assert count(kept) == limit
        assert kept[0].then == job.steps[0].then[: limit - 1]


def test_poisson_arrivals_come_at_the_load_and_independently() -> None:
    made = jobs("unique", requests=5000)
    gaps = [later.at_s - earlier.at_s for earlier, later in pairwise(made)]
    assert 1 / fmean(gaps) == pytest.approx(LOAD, rel=0.05)
    assert pstdev(gaps) == pytest.approx(fmean(gaps), rel=0.1)


def test_bursty_arrivals_keep_the_rate_and_have_the_variation_they_say() -> None:
    made = jobs("unique", requests=20_000, arrival={"process": "bursty", "cv": 3.0})
    gaps = [later.at_s - earlier.at_s for earlier, later in pairwise(made)]
    assert 1 / fmean(gaps) == pytest.approx(LOAD, rel=0.1)
    assert pstdev(gaps) == pytest.approx(3 * fmean(gaps), rel=0.1)


def test_even_arrivals_have_equal_gaps() -> None:
    made = jobs("unique", requests=100, arrival={"process": "even"})
    assert [job.at_s for job in made] == pytest.approx([(number + 1) / LOAD for number in range(100)])


def test_unique_prompts_share_nothing_and_have_the_lengths_that_were_asked_for() -> None:
    found = figures(jobs("unique", requests=5000))
    assert found.reusable_share == 0
    assert found.input_tokens.mean == pytest.approx(3000, rel=0.05)
    assert found.output_tokens.mean == pytest.approx(250, rel=0.05)


def test_a_hot_prefix_is_in_every_prompt_and_nothing_else_is() -> None:
    found = figures(jobs("hot_prefix", prefix=8000, own=500))
    assert found.reusable_share == pytest.approx(8000 / 8500 * 0.999, abs=1e-3)
    assert found.prefixes == 1


def test_heavy_tailed_answers_have_a_few_that_outweigh_the_rest() -> None:
    made = jobs("hot_prefix", requests=5000, output={"shape": "pareto", "min": 150, "exponent": 1.25, "max": 12_000})
    lengths = sorted(step.output_tokens for job in made for step in job.steps)
    assert lengths[0] >= 150
    assert lengths[-1] == 12_000
    assert sum(lengths[-500:]) > 0.4 * sum(lengths)


def test_the_shared_prefix_benchmark_sends_each_of_its_750_prompts_once_a_cycle() -> None:
    made = jobs("shared_prefixes", requests=1500)
    prompts = [job.steps[0].prompt for job in made]
    assert len(set(prompts[:750])) == len(set(prompts[750:])) == len(set(prompts)) == 750
    assert prompts[:750] != prompts[750:]
    assert len({prompt[0] for prompt in prompts}) == 150
    assert {(sum(tokens for _, tokens in prompt)) for prompt in prompts} == {7200}
    assert {step.output_tokens for job in made for step in job.steps} == {1000}


def test_without_prompts_of_their_own_groups_are_asked_ever_new_questions() -> None:
    prompts = [job.steps[0].prompt for job in jobs("shared_prefixes", prompts=0, requests=1500)]
    assert len(set(prompts)) == 1500
    assert len({prompt[0] for prompt in prompts}) == 150


def test_the_key_population_has_the_published_popularity() -> None:
    made = jobs("zipf_keys", requests=60_000)
    keys = Counter(job.steps[0].prompt[1][0] for job in made)
    assert keys.most_common(1)[0][1] < 0.003 * 60_000
    top = sum(count for content, count in keys.items() if content - 2 < 0.04 * 128_824)
    assert top / 60_000 == pytest.approx(0.47, abs=0.03)


def test_retrieved_text_breaks_the_prefix_of_a_key_as_often_as_it_says() -> None:
    made = jobs("zipf_keys", keys=1, requests=3000)
    retrieved = [job.steps[0].prompt[2][0] for job in made]
    changed = sum(earlier != later for earlier, later in pairwise(retrieved))
    assert changed / 2999 == pytest.approx(0.67, abs=0.03)


def test_questions_about_documents_reuse_the_popular_ones() -> None:
    made = jobs("documents", requests=3000)
    documents = Counter(job.steps[0].prompt[0][0] for job in made)
    assert len(documents) > 400
    assert documents.most_common(1)[0][1] > 20 * documents.most_common()[-1][1]
    corpus = {job.steps[0].prompt[0] for job in made}
    assert sum(tokens for _, tokens in corpus) > 2 * 8 * 301_808, "the working set exceeds eight caches"
    assert figures(made).reusable_share > 0.7


def test_several_retrieved_documents_are_different_and_behind_the_instructions() -> None:
    for job in jobs("documents", documents=5, retrieved=3, instructions=100, requests=50):
        head, *found, question = job.steps[0].prompt
        assert head[1] == 100
        assert question[1] == 150
        assert len(set(found)) == len(found) == 3


def test_churn_replaces_every_document_after_its_period() -> None:
    made = jobs("churn", period_s=30.0, requests=1000)
    early = {job.steps[0].prompt[0] for job in made if job.at_s < 30}
    late = {job.steps[0].prompt[0] for job in made if 30 <= job.at_s < 60}
    assert early
    assert late
    assert not early & late


def test_siblings_are_equal_prompts_within_milliseconds() -> None:
    made = jobs("siblings", requests=800)
    assert len(made) == 100
    for job in made:
        assert len(job.steps) == 8
        assert len({step.prompt for step in job.steps}) == 1
        assert all(0 <= step.delay_s <= 0.01 for step in job.steps)
    assert figures(made).reusable_share == pytest.approx(7 / 8, abs=0.02)


def test_children_come_at_once_after_their_parent_and_extend_its_answer() -> None:
    sent = replayed("fan_out", answer_s=5.0, requests=70)
    parents = {request.session: request for request in sent if request.turn == 0}
    children = [request for request in sent if request.turn == 1]
    assert len(parents) == 10
    assert len(children) == 60
    for child in children:
        parent = parents[child.session]
        assert child.prompt[:-1] == (*parent.prompt, (parent.answer, parent.output_tokens))
        assert 5.05 <= child.at_s - parent.at_s <= 5.07


@pytest.mark.parametrize("kind", ["chat", "agent"])
def test_each_turn_extends_the_one_before_and_its_answer(kind: str) -> None:
    sessions: dict[int | None, list[SimRequest]] = {}
    for request in replayed(kind, answer_s=3.0):
        sessions.setdefault(request.session, []).append(request)
    assert max(map(len, sessions.values())) > 3
    for turns in sessions.values():
        assert [request.turn for request in turns] == list(range(len(turns)))
        for before, after in pairwise(turns):
            assert after.prompt[:-1] == (*before.prompt, (before.answer, before.output_tokens))
            assert after.at_s >= before.at_s + 3.0


def test_chat_has_about_six_turns_and_twenty_seconds_of_thought() -> None:
    made = jobs("chat", requests=6000)
    assert figures(made).turns.mean == pytest.approx(6, rel=0.15)
    pauses = [step.delay_s for job in made for step in job.walk() if step.turn]
    assert fmean(pauses) == pytest.approx(20, rel=0.1)
    assert min(pauses) >= 2


def test_agents_reuse_nearly_everything_and_grow_to_long_contexts() -> None:
    found = figures(jobs("agent", requests=4000))
    assert found.reusable_share > 0.9
    assert found.turns.mean > 12
    assert found.input_tokens.p99 > 50_000
    assert found.input_tokens.max <= 110_000 + 12_000


def test_adapters_have_names_by_popularity_and_prefixes_of_their_own() -> None:
    made = [job.steps[0] for job in jobs("adapters", requests=2000)]
    names = Counter(step.adapter for step in made)
    assert names["adapter-0"] > names["adapter-7"] > 0
    assert len({(step.adapter, step.prompt[0]) for step in made}) == 8


def test_a_mixture_gives_each_part_its_share_and_its_labels() -> None:
    parts = [
        {"share": 3, "priority": 5, "workload": {"kind": "unique"}},
        {"share": 1, "group": "docs", "flow": "b", "adapter": "a", "workload": {"kind": "documents"}},
    ]
    steps = [step for job in jobs("mixture", requests=4000, parts=parts) for step in job.steps]
    labels = Counter((step.group, step.flow, step.priority, step.adapter) for step in steps)
    assert set(labels) == {("unique", "unique", 5, None), ("docs", "b", 0, "a")}
    assert labels["unique", "unique", 5, None] / 4000 == pytest.approx(0.75, abs=0.03)


def test_parts_of_a_mixture_never_share_content_by_accident() -> None:
    parts = [{"group": name, "workload": {"kind": "chat"}} for name in ("a", "b")]
    contents: dict[str, set[int]] = {"a": set(), "b": set()}
    for job in jobs("mixture", parts=parts):
        for step in job.walk():
            contents[step.group] |= {content for content, _ in step.prompt}
    assert not contents["a"] & contents["b"]


def test_phases_follow_each_other_by_share_of_requests_and_at_their_own_rate() -> None:
    phases = [
        {"group": "first", "workload": {"kind": "documents"}},
        {"group": "second", "rate": 4.0, "workload": {"kind": "unique"}},
        {"group": "third", "share": 2, "workload": {"kind": "documents"}},
    ]
    made = jobs("phases", requests=4000, phases=phases)
    groups = [job.steps[0].group for job in made]
    assert groups == ["first"] * 1000 + ["second"] * 1000 + ["third"] * 2000
    lasted_s = [made[end].at_s - made[start].at_s for start, end in ((0, 999), (1000, 1999))]
    assert lasted_s[0] / lasted_s[1] == pytest.approx(4, rel=0.15)
    assert all(earlier.at_s <= later.at_s for earlier, later in pairwise(made))


def test_the_mooncake_trace_is_read_as_published() -> None:
    made = jobs("mooncake", requests=20_000, load=1.0, tick_s=3.0)
    found = summarise(made, 512)
    assert found.requests == 12_031
    assert found.input_tokens.mean == pytest.approx(12_035, abs=1)
    assert found.reusable_share == pytest.approx(0.374, abs=0.002)
    assert found.sessions == 7373
    assert len({job.at_s for job in made}) > 12_000, "requests of one tick are spread over it"
    assert all(earlier.at_s <= later.at_s for earlier, later in pairwise(made))


def test_a_trace_at_twice_the_load_takes_half_the_time() -> None:
    slow, fast = (jobs("mooncake", load=load, file="mooncake_synthetic") for load in (1.0, 2.0))
    assert fast[-1].at_s == pytest.approx(slow[-1].at_s / 2)
    assert [job.steps for job in slow] == [job.steps for job in fast]


@pytest.mark.parametrize(
    ("file", "requests", "given", "made"),
    [("azure_llm_2023_conv", 19_366, 1155, 211), ("azure_llm_2023_code", 8819, 2048, 28)],
)
def test_the_azure_traces_are_read_as_published_with_nothing_shared(
    file: str, requests: int, given: int, made: int
) -> None:
    found = figures(jobs("azure", requests=30_000, file=file))
    assert found.requests == requests
    assert found.input_tokens.mean == pytest.approx(given, abs=1)
    assert found.output_tokens.mean == pytest.approx(made, abs=1)
    assert found.reusable_share == 0
