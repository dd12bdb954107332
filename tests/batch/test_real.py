"""Real processes on the real model: whatever is killed, the same command gives the bytes of an undisturbed run."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

TOPICS = [
    "a night train",
    "keeping bees",
    "old maps",
    "a broken clock",
    "the first snow",
    "bread",
    "a long bridge",
    "chess",
]
FORMS = [
    "Write a sentence about {}.",
    "Name a colour that suits {}.",
    "Why do people like {}?",
    "Describe {} to a child.",
]


def make_rows():
    """Greedy and sampled rows, chats and completions, and one that fails."""
    rows = []
    for number, (topic, form) in enumerate((t, f) for t in TOPICS for f in FORMS):
        text, length = form.format(topic), 16 + number % 5 * 8
        sampling = {"max_tokens": length, "temperature": 0 if number % 2 else 0.9}
        if number % 3:
            rows.append({"custom_id": f"row-{number}", "prompt": text, **sampling})
        else:
            rows.append({"custom_id": f"row-{number}", "messages": [{"role": "user", "content": text}], **sampling})
    rows.append({"custom_id": "wrong", "prompt": "x", "max_tokens": 0})
    return rows


class Command:
    """`coremill run` in a folder of its own."""

    def __init__(self, folder, model, cache):
        self.out, self.errors, self.stats = folder / "out.jsonl", folder / "out.errors.jsonl", folder / "stats.json"
        self.input = folder / "in.jsonl"
        self.input.write_text("".join(json.dumps(row) + "\n" for row in make_rows()))
        self._model, self._environ = str(model), {**os.environ, "COREMILL_CACHE": str(cache)}

    def start(self, *options, source=None, stdin=subprocess.DEVNULL, within=()):
        command = [*within, sys.executable, "-m", "coremill.tools", "run", source or str(self.input), "-m", self._model]
        command += ["-o", str(self.out), "--stats", str(self.stats), *options]
        return subprocess.Popen(
            command, env=self._environ, stdin=stdin, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def finish(self, process):
        """(exit code, what it said)."""
        said = process.communicate(timeout=120)[1]
        return process.returncode, said

    def wait_for_rows(self, process, num):
        deadline = time.monotonic() + 60
        while not self.out.exists() or self.out.read_bytes().count(b"\n") < num:
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
            time.sleep(0.005)

    def bytes_of_rows(self):
        """What must be the same in every run; each row once."""
        made = {}
        for line in self.out.read_bytes().splitlines():
            row = json.loads(line)
            body = row["response"]["body"]
            assert row["custom_id"] not in made
            usage = {name: count for name, count in body["usage"].items() if name != "prompt_tokens_details"}
            made[row["custom_id"]] = (row["id"], body["choices"], usage, body["system_fingerprint"])
        failed = [(row["custom_id"], row["error"]["code"]) for row in map(json.loads, self.errors.open())]
        return made, failed


@pytest.fixture(scope="module")
def command(tmp_path_factory, smollm2_gguf, smollm2_pack, model_folder):
    return lambda: Command(tmp_path_factory.mktemp("run"), smollm2_gguf, model_folder / "packs")


@pytest.fixture(scope="module")
def undisturbed(command):
    run = command()
    code, said = run.finish(run.start())
    assert code == 3, said
    made, failed = run.bytes_of_rows()
    assert len(made) == len(TOPICS) * len(FORMS) and failed == [("wrong", "invalid_value")]
    return made, failed


def family(process):
    """The command's processes: workers, helper and itself."""
    return [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]


def assert_gone(processes):
    _, alive = psutil.wait_procs(processes, timeout=1)
    assert not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def is_worker(process):
    return "coremill.worker" in process.cmdline()


def test_killed_coordinator_then_the_same_command(command, undisturbed):
    run = command()
    for rows in (1, 10):
        process = run.start()
        run.wait_for_rows(process, rows)
        processes = family(process)
        assert any(map(is_worker, processes))
        process.kill()
        process.communicate()
        assert_gone(processes)
    code, said = run.finish(run.start())
    assert code == 3, said
    assert "finished by earlier runs" in said
    assert run.bytes_of_rows() == undisturbed
    assert json.loads(run.stats.read_text())["skipped_rows"] >= 10


def test_killed_workers_in_mid_run(command, undisturbed):
    run = command()
    process = run.start()
    for rows in (2, 12):
        run.wait_for_rows(process, rows)
        victims = [p for p in family(process) if is_worker(p)]
        victims[rows % len(victims)].kill()
    processes = family(process)
    code, said = run.finish(process)
    assert code == 3, said
    assert "died" in said
    assert run.bytes_of_rows() == undisturbed
    assert sum(worker["restarts"] for worker in json.loads(run.stats.read_text())["workers"]) >= 1
    assert_gone(processes)


def test_everything_killed_at_once(command, undisturbed):
    run = command()
    process = run.start("--in-order")
    run.wait_for_rows(process, 5)
    processes = family(process)
    for each in processes:
        each.kill()
    process.communicate()
    assert_gone(processes)
    code, said = run.finish(run.start("--workers", "1", "--max-active", "3"))
    assert code == 3, said
    assert run.bytes_of_rows() == undisturbed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_then_resumed(command, undisturbed, number):
    run = command()
    process = run.start()
    run.wait_for_rows(process, 3)
    processes = family(process)
    pressed = time.monotonic()
    # As a terminal does it: to every process in the foreground.
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    code, said = run.finish(process)
    assert time.monotonic() - pressed < 5, said  # a second, and what a loaded test machine adds
    assert code == 128 + number, said
    assert "the same command goes on from here" in said
    assert_gone(processes)
    stats = json.loads(run.stats.read_text())
    assert stats["new_results"] == run.out.read_bytes().count(b"\n")
    code, said = run.finish(run.start("--in-order"))
    assert code == 3, said
    assert run.bytes_of_rows() == undisturbed


def test_statistics_and_summary_add_up(command):
    run = command()
    code, said = run.finish(run.start("--in-order"))
    assert code == 3
    stats = json.loads(run.stats.read_text())
    rows = [json.loads(line)["response"]["body"]["usage"] for line in run.out.open()]
    assert (stats["rows"], stats["errors"], stats["results"]) == (len(rows) + 1, 1, len(rows))
    assert stats["prompt_tokens"] == sum(row["prompt_tokens"] for row in rows)
    assert stats["completion_tokens"] == sum(row["completion_tokens"] for row in rows)
    assert stats["seconds"] > 0 and stats["startup_seconds"] > 0
    for worker in stats["workers"]:
        for name in ("pid", "cores", "prefill_tokens", "decode_tokens", "busy_seconds", "mean_batch", "rss_bytes"):
            assert worker[name], name
        assert 0 <= worker["borrowed_steps"] <= worker["steps"]
        parts = [worker[f"pss_{part}_bytes"] for part in ("weights", "arena", "private")]
        assert worker["pss_bytes"] == pytest.approx(sum(parts), rel=0.05)
    computed = sum(worker["prefill_tokens"] for worker in stats["workers"])
    assert computed + stats["cached_tokens"] == stats["prompt_tokens"]
    assert f"rows: {len(rows) + 1} read = {len(rows)} results + 1 failed" in said


def test_text_from_a_pipe_and_model_names(command):
    run = command()
    process = run.start("--max-tokens", "3", "--temperature", "0", source="-", stdin=subprocess.PIPE)
    process.stdin.write("One prompt\n\nAnother\n")
    process.stdin.flush()
    run.wait_for_rows(process, 2)  # while the pipe is still open
    process.stdin.close()
    process.stdin = None
    code, said = run.finish(process)
    assert code == 0, said
    rows = {row["custom_id"]: row["response"]["body"] for row in map(json.loads, run.out.open())}
    assert set(rows) == {"line-1", "line-3"}
    assert rows["line-1"]["usage"]["completion_tokens"] == 3
    assert "plain text, one prompt a line" in said and "hint: each line is a text that the model continues" in said


def test_lines_that_are_meant_to_be_continued_get_no_hint(command):
    run = command()
    run.input.with_suffix(".txt").write_text("One prompt\n")
    code, said = run.finish(run.start("--no-chat", "--max-tokens", "1", source=str(run.input.with_suffix(".txt"))))
    assert code == 0 and "plain text" in said and "hint" not in said


def test_models_that_rows_name(command, smollm2_gguf):
    run = command()
    names = [None, "default", smollm2_gguf.stem, "Smollm2 135M 8k Lc100K Mix1 Ep2", "gpt-4", smollm2_gguf.name]
    rows = [{"custom_id": str(name), "model": name, "prompt": "x", "max_tokens": 1} for name in names]
    run.input.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, said = run.finish(run.start())
    assert code == 3, said
    assert {row["custom_id"] for row in map(json.loads, run.out.open())} == {str(name) for name in names[:4]}
    assert {row["error"]["code"] for row in map(json.loads, run.errors.open())} == {"model_not_found"}


def test_finished_runs_start_nothing(command):
    run = command()
    run.input.write_text('{"prompt": "One, two,", "max_tokens": 3, "temperature": 0}\n')
    assert run.finish(run.start())[0] == 0
    code, said = run.finish(run.start())
    assert code == 0 and "nothing to do" in said and "prompts" not in said
    assert json.loads(run.stats.read_text())["workers"] == []
    run.input.write_text('{"prompt": "other"}\n')
    code, said = run.finish(run.start())
    assert code == 4 and "line 1" in said
    code, said = run.finish(run.start("--keep-changed"))
    assert code == 5, said


def test_chats_from_plain_text_with_a_template(command, tmp_path):
    run, template = command(), tmp_path / "template.jinja"
    run.input.with_suffix(".txt").write_text("three, four\n")
    template.write_text("one, two, {{ messages[-1].content }},")
    options = ("--chat", "--chat-template", str(template), "--max-tokens", "4", "--temperature", "0")
    source = str(run.input.with_suffix(".txt"))
    code, said = run.finish(run.start(*options, source=source))
    assert code == 0, said
    body = json.loads(run.out.read_text())["response"]["body"]
    assert "hint" not in said
    assert body["object"] == "chat.completion" and "five" in body["choices"][0]["message"]["content"]
    template.write_text("{{ messages[-1].content }},")
    code, said = run.finish(run.start(*options, source=source))
    assert code == 4 and "the chat template was" in said
    code, said = run.finish(run.start("--chat"))
    assert code == 2 and "--chat is for plain text" in said
    code, said = run.finish(run.start("--chat-template", "missing", source=source))
    assert code == 2 and "--chat-template missing" in said


def test_refusals_say_why_and_start_nothing(command):
    run = command()
    run.input.write_text('{"prompt": "x", "max_tokens": 1}\n')
    assert run.finish(run.start())[0] == 0
    with open(run.out, "ab") as file:
        file.write(run.out.read_bytes()[:50])
    code, said = run.finish(run.start())
    assert code == 0 and sum("out.jsonl: its last line was torn" in line for line in said.splitlines()) == 1, said
    code, said = run.finish(run.start("--seed", "1", "--ctx", "64"))
    assert code == 4 and "--seed was 0 and is 1" in said and "--ctx was 4096 and is 64" in said
    code, said = run.finish(run.start("--errors", str(run.input)))
    assert code == 1 and "input itself" in said
    code, said = run.finish(run.start("--ctx", "100000"))
    assert code == 2 and "8192" in said


def test_runs_do_not_depend_on_who_listens(command):
    """Standard streams that are closed, full, or without a reader: every row is run, and the summary said if it can."""
    run = command()
    run.input.write_text('{"prompt": "One, two,", "max_tokens": 3, "temperature": 0}\n')
    for streams, code in (("2>&-", 0), ("2>/dev/full", 0), ("2>&1 >&- | head -c 0", 0), (">/dev/full", 0)):
        process = run.start("--show", "1", within=["/bin/bash", "-o", "pipefail", "-c", f'"$@" {streams}', "bash"])
        found, said = run.finish(process)
        assert found == code, said
        assert run.out.read_bytes().count(b"\n") == 1
        run.out.unlink()
    assert "cannot be shown: standard output: No space left" in said and "rows: 1 read = 1 results" in said
