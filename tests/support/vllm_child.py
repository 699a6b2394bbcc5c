"""A vLLM engine as a user writes one: builds `LLM`, answers prompts, prints one JSON object and exits.

Its only argument is JSON: ``model``, ``prompts``, ``max_tokens`` and ``engine``, the keyword arguments of `LLM`.
"""

from __future__ import annotations

import json
import sys
import time


def main() -> None:
    given = json.loads(sys.argv[1])
    start = time.monotonic()
    from vllm import LLM, SamplingParams

    imported = time.monotonic()
    engine = LLM(given["model"], **given["engine"])
    warm = time.monotonic()
    greedy = SamplingParams(temperature=0.0, max_tokens=given["max_tokens"], logprobs=1)
    answers = []
    for prompt in given["prompts"]:  # one by one: what is compared is the weights, not how a batch is cut
        (answer,) = engine.chat([{"role": "user", "content": prompt}], greedy, use_tqdm=False)
        said = answer.outputs[0]
        sure = [step[token].logprob for token, step in zip(said.token_ids, said.logprobs, strict=True)]
        answers.append({"text": said.text, "tokens": list(said.token_ids), "logprobs": sure})
    accepted = 0.0
    if not given["engine"].get("disable_log_stats", True):
        accepted = sum(m.value for m in engine.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens")
    seconds = {"import_s": imported - start, "init_s": warm - imported, "answer_s": time.monotonic() - warm}
    print(
        "\n"
        + json.dumps(
            {"answers": answers, "accepted": accepted, **{name: round(value, 3) for name, value in seconds.items()}}
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
