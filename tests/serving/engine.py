"""Runs engines: vLLM is imported once, and each job gets a fork with an engine of its own.

A job says what the engine is and what it is asked; the answer is JSON. Engines do not like to
share a process, and importing vLLM takes longer than all that a tiny model says. As a program:
reads a job's path per line on stdin, and says the fork's exit status in a line on stdout.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

Json = dict[str, Any]


def run_job(job: Json) -> Json:
    """Starts the engine of a job and asks it batch after batch.

    A job has `llm` (arguments of `vllm.LLM`), `batches` ({name: [request, ...]}) and `rpc` (names
    of worker methods, asked at the end). A request has `prompt`, token ids, and `params` of
    `SamplingParams`, and may have `at`, the step at which it comes, and `abort_at`.
    """
    from vllm import LLM

    llm = LLM(**job["llm"])
    answer: Json = {"batches": {}, "steps": {}, "metrics": {}, "rpc": {}}
    for name, requests in job["batches"].items():
        before = _counters(llm)
        answer["batches"][name], answer["steps"][name] = _run_batch(llm.llm_engine, name, requests)
        after = _counters(llm)
        answer["metrics"][name] = {k: _minus(after[k], before.get(k)) for k in after}
    for method in job.get("rpc", []):
        answer["rpc"][method] = llm.collective_rpc(method)
    return answer


def _run_batch(engine: Any, name: str, requests: list[Json]) -> tuple[list[Json | None], int]:
    """Steps the engine until all are done: the answers (None where aborted), and the steps."""
    answers: list[Json | None] = [None] * len(requests)
    waiting = sorted(range(len(requests)), key=lambda i: requests[i].get("at", 0))
    step = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and requests[waiting[0]].get("at", 0) <= step:
            i = waiting.pop(0)
            _add(engine, f"{name}-{i}", requests[i])
        gone = [f"{name}-{i}" for i, r in enumerate(requests) if r.get("abort_at") == step]
        if gone:
            engine.abort_request(gone)
        for output in engine.step():
            if output.finished:
                answers[int(output.request_id.rsplit("-", 1)[1])] = _answer(output)
        step += 1
    engine.step()  # the workers hear that the last one has ended
    return answers, step


def _add(engine: Any, request_id: str, request: Json) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    params = dict(request["params"])
    if "structured_outputs" in params:
        params["structured_outputs"] = StructuredOutputsParams(**params["structured_outputs"])
    prompt = {"prompt_token_ids": request["prompt"]}
    engine.add_request(request_id, prompt, SamplingParams(**params))


def _answer(output: Any) -> Json:
    completion = output.outputs[0]
    return {
        "token_ids": list(completion.token_ids),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "num_cached_tokens": output.num_cached_tokens,
        "logprobs": completion.logprobs
        and [{str(k): v.logprob for k, v in row.items()} for row in completion.logprobs],
    }


def _counters(llm: Any) -> Json:
    """Counters and vectors of the engine's metrics, by name."""
    found: Json = {}
    for metric in llm.get_metrics():
        value = getattr(metric, "values", None) or getattr(metric, "value", None)
        if isinstance(value, (int, float, list)):
            found[metric.name] = value
    return found


def _minus(after: Any, before: Any) -> Any:
    if before is None:
        return after
    if isinstance(after, list):
        return [a - b for a, b in zip(after, before, strict=True)]
    return after - before


def _run_and_exit(job_path: Path) -> None:
    """In the fork: the answer lies beside the job, the log too."""
    status = 1
    try:
        _answer_job(job_path)
        status = 0
    except Exception:
        traceback.print_exc()
        raise
    finally:
        # Whatever happened: a fork must not go on as the process that it is a copy of.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _answer_job(job_path: Path) -> None:
    os.setsid()
    log = os.open(job_path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    job = json.loads(job_path.read_text())
    os.environ.update(job.get("env", {}))
    job_path.with_suffix(".answer").write_text(json.dumps(run_job(job)))


def main() -> None:
    """Serves jobs until stdin ends."""
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm import LLM  # noqa: F401

    print("ready", flush=True)
    for line in sys.stdin:
        path, limit_s = line.rsplit(maxsplit=1)
        pid = os.fork()
        if pid == 0:
            _run_and_exit(Path(path))
        print(_wait(pid, float(limit_s)), flush=True)


def _wait(pid: int, limit_s: float) -> int:
    """The fork's exit status; a fork that overruns is killed with all that it started."""

    def overrun(signum: int, frame: object) -> None:
        os.killpg(pid, signal.SIGKILL)

    signal.signal(signal.SIGALRM, overrun)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    _, status = os.waitpid(pid, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return status


if __name__ == "__main__":
    main()
