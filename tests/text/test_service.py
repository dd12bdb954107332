"""The helper process: rows that exceed a limit fail alone, and nothing outlives anything."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from coremill.config.errors import EngineClosedError, RequestError, UnsupportedModelError
from coremill.coordinator.text.requests import Prepared, TextRequest
from coremill.coordinator.text.service import TextService

HELLO = TextRequest(prompt="Hello world")
HELLO_IDS = Prepared((19556, 905))
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def chat(template, content="Hi"):
    return TextRequest(messages=[{"role": "user", "content": content}], template=template)


@pytest.fixture(scope="module")
def service(smollm2_description):
    with TextService(description=smollm2_description, time_limit=1.0, memory_limit=512 << 20) as service:
        yield service


def wait_until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_answers_come_in_order(service):
    requests = [TextRequest(prompt=f"{i} {'x' * (i % 50)}") for i in range(300)] + [HELLO]
    answers = service.prepare(requests)
    assert answers[-1] == HELLO_IDS
    assert answers[:300] == [service.prepare([request])[0] for request in requests[:300]]
    assert service.count(requests) == [len(answer.ids) for answer in answers]
    assert service.prepare([]) == []


def test_facts(service):
    assert service.vocab_size == 49152
    assert service.special == {"bos": 1, "eos": 2, "eot": None, "unknown": 0, "padding": 2}


def test_chats_and_errors(service):
    answers = service.prepare(
        [
            TextRequest(messages=[{"role": "user", "content": "Hi"}]),
            chat("{{ raise_exception('no') }}"),
            TextRequest(prompt="\ud800"),
            TextRequest(prompt=[5, 6]),
            TextRequest(messages=[{"role": "user", "content": object()}]),
            HELLO,
        ]
    )
    assert answers[0].ids[-3:] == (520, 9531, 198)
    assert [getattr(answer, "code", None) for answer in answers] == [
        None,
        "template_error",
        "invalid_value",
        None,
        "invalid_value",
        None,
    ]
    assert answers[3] == Prepared((5, 6)) and answers[5] == HELLO_IDS


def test_the_constructor_does_not_wait(smollm2_description):
    service = TextService(description=smollm2_description)
    assert not service._loaded.is_set()
    service.close()


@pytest.mark.parametrize(
    "request_, code, words",
    [
        (chat(ENDLESS), "text_time_limit", "more than 1 s"),
        (chat("{{ 10 ** (10 ** 8) }}"), "text_time_limit", "more than 1 s"),
        (chat("{{ 'x' * 10 ** 10 }}"), "template_error", "more memory"),
    ],
    ids=["loops", "one long operation", "memory in a template"],
)
def test_a_bomb_takes_only_its_own_row(service, request_, code, words):
    rows = [HELLO] * 5 + [request_] + [HELLO] * 60
    answers = service.prepare(rows)
    error = answers.pop(5)
    assert isinstance(error, RequestError) and error.code == code and words in str(error)
    assert answers == [HELLO_IDS] * 65


def test_a_text_that_needs_too_much_memory(smollm2_description):
    with TextService(description=smollm2_description, time_limit=60, memory_limit=128 << 20) as service:
        error, answer = service.prepare([TextRequest(prompt="ab " * (3 << 20)), HELLO])
    assert error.code == "text_memory_limit" and "more than 128 MiB" in str(error)
    assert answer == HELLO_IDS


def test_several_bombs_at_once(service):
    rows = [chat(ENDLESS), HELLO, chat("{{ raise_exception('x') }}"), HELLO, chat(ENDLESS)]
    answers = service.prepare(rows)
    codes = [answer.code if isinstance(answer, RequestError) else answer for answer in answers]
    assert codes == ["text_time_limit", HELLO_IDS, "template_error", HELLO_IDS, "text_time_limit"]


def test_a_kill_from_outside_charges_nobody(smollm2_description):
    slow = "{% for i in range(3000) %}{% for j in range(300) %}{% endfor %}{% endfor %}{{ messages[0].content }}"
    with TextService(description=smollm2_description) as service:
        assert service.prepare([chat(slow)]) == [Prepared((26843,))]
        # In the middle of a row, between rows, and while it loads.
        for delay in (0.05, 0.0, None):
            if delay is None:
                os.kill(service.pid, signal.SIGKILL)
                delay = 0.02
            future = service.submit([chat(slow), HELLO, chat(slow)])
            time.sleep(delay)
            if service.pid is not None:
                with contextlib.suppress(ProcessLookupError):  # it may still be the one killed before
                    os.kill(service.pid, signal.SIGKILL)
            ids = [(26843,), HELLO_IDS.ids, (26843,)]
            assert future.result(60) == ids
        assert service.num_restarts >= 3


def test_deaths_are_told(smollm2_description):
    deaths = []

    def told(death):
        deaths.append((death.cause, death.why, threading.current_thread() is threading.main_thread()))
        raise ValueError("its author's affair")

    with TextService(description=smollm2_description, time_limit=1.0, on_death=told) as service:
        assert service.prepare([HELLO]) == [HELLO_IDS] and not deaths
        os.kill(service.pid, signal.SIGKILL)
        wait_until(lambda: deaths)
        assert deaths == [("outside", "it was ended by SIGKILL", False)]
        (error,) = service.prepare([chat(ENDLESS)])
        assert error.code == "text_time_limit" and deaths[1:] == [("time", "a row took too much time", False)]
    assert len(deaths) == 2, "closing it is no death"


def test_kills_while_it_starts_are_survived(smollm2_description):
    with TextService(description=smollm2_description) as service:
        killed = set()
        future = service.submit([HELLO])
        while len(killed) < 6:
            pid = service.pid
            if pid is not None and pid not in killed:
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)
        assert future.result(60) == [HELLO_IDS.ids]
        assert service.num_restarts == 6


def test_a_row_that_is_killed_again_and_again_is_given_up(smollm2_description):
    with TextService(description=smollm2_description) as service:
        future = service.submit([chat(ENDLESS), HELLO])
        killed = set()
        while not future.done():
            pid = service.pid
            if pid is not None and pid not in killed and service.num_restarts == len(killed):
                wait_until(lambda: service._away or future.done())  # it has begun with a row
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        error, ids = future.result()
        assert error.code == "text_helper_died" and "SIGKILL" in str(error)
        assert ids == HELLO_IDS.ids


def test_a_stopped_helper_is_replaced(smollm2_description, monkeypatch):
    monkeypatch.setattr("coremill.coordinator.text.service._GRACE_SECONDS", 0.2)
    with TextService(description=smollm2_description, time_limit=0.3) as service:
        assert service.prepare([HELLO]) == [HELLO_IDS]
        os.kill(service.pid, signal.SIGSTOP)
        assert service.prepare([HELLO]) == [HELLO_IDS]
        assert service.num_restarts == 1


def test_many_threads(service):
    wrong = []

    def work(number):
        for turn in range(20):
            text = f"thread {number} turn {turn}"
            prompts = [TextRequest(prompt=text), chat("{{ messages[0].content }}", text)]
            one, two = service.prepare(prompts)
            if one != two or service.count(prompts) != [len(one.ids)] * 2:
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_an_idle_service_costs_nothing(service):
    service.prepare([HELLO])

    def used() -> list[str]:
        with open(f"/proc/{service.pid}/stat") as file:
            return file.read().split()[13:15]

    for _ in range(100):  # what it was just asked for may have an end to it
        before = used()
        time.sleep(0.5)
        if used() == before:
            return
    raise AssertionError("it uses the CPU while nobody asks for anything")


def test_close(smollm2_description):
    service = TextService(description=smollm2_description)
    service.prepare([HELLO])
    pid = service.pid
    future = service.submit([chat(ENDLESS)])
    start = time.monotonic()
    service.close()
    assert time.monotonic() - start < 5
    assert not is_running(pid)
    with pytest.raises(EngineClosedError):
        future.result(0)
    with pytest.raises(EngineClosedError):
        service.prepare([HELLO])
    service.close()


def test_a_tokenizer_that_is_not_supported(smollm2_description):
    description = smollm2_description | {"tokenizer.ggml.pre": "nobody"}
    with TextService(description=description) as service:
        for call in (lambda: service.prepare([HELLO]), lambda: service.vocab_size, lambda: service.count([HELLO])):
            with pytest.raises(UnsupportedModelError, match="'nobody'"):
                call()


def test_a_vocabulary_without_text(byte_level):
    """Nobody can write a word to it; the helper lives and says so."""
    description = byte_level()
    description["tokenizer.ggml.token_type"] = [3] * len(description["tokenizer.ggml.tokens"])
    with TextService(description=description) as service:
        (answer,) = service.prepare([TextRequest(prompt="a")])
        assert answer.code == "unencodable_text" and service.num_restarts == 0
        assert service.prepare([TextRequest(prompt=[3])]) == [Prepared((3,))]


def test_an_address_space_that_is_limited_already(byte_level):
    code = f"""
import resource
from coremill.coordinator.text.requests import TextRequest
from coremill.coordinator.text.service import TextService
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
with TextService(description={byte_level()!r}) as service:
    assert service.count([TextRequest(prompt="a")]) == [1]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)


def test_a_pack_that_is_not_there(tmp_path):
    from coremill.config.errors import CoremillError

    with TextService(tmp_path / "none.pack") as service, pytest.raises(CoremillError, match=r"none\.pack"):
        service.prepare([HELLO])


PARENT = """
import sys, threading, time
from coremill.coordinator.text.requests import TextRequest
from coremill.coordinator.text.service import TextService
from tests_description import description
service = TextService(description=description)
assert service.vocab_size
template = {template!r}
if template:
    service.submit([TextRequest(messages=[], template=template)])
    time.sleep(0.3)
print(service.pid, flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["time.sleep(60)", "", "sys.exit(3)", "1 / 0"], ids=["killed", "end", "exit", "error"])
@pytest.mark.parametrize("template", ["", ENDLESS, "{{ 10 ** (10 ** 8) }}"], ids=["idle", "busy", "deaf"])
def test_the_helper_dies_with_its_parent(tmp_path, byte_level, end, template):
    (tmp_path / "tests_description.py").write_text(f"description = {byte_level()!r}\n")
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(template=template, end=end))
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    pid = int(parent.stdout.readline())
    if end.startswith("time"):
        assert is_running(pid)
        parent.kill()
    parent.wait(10)
    parent.stdout.close()
    wait_until(lambda: not is_running(pid), 1.0)


def test_use_after_a_fork_is_refused():
    code = """
import os
from coremill.config.errors import EngineError
from coremill.coordinator.text.requests import TextRequest
from coremill.coordinator.text.service import TextService
service = TextService(description={})
if os.fork() == 0:
    try:
        service.prepare([TextRequest(prompt="x")])
    except EngineError as error:
        os._exit(7 if "fork" in str(error) else 1)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)


def test_small_requests_share_their_way_and_one_that_kills_is_charged_alone(service):
    requests = [TextRequest(prompt=f"{n} {'x' * (n % 50)}") for n in range(200)]
    expected = service.prepare(requests)
    jobs_before = service._num_jobs
    with stopped(service):  # what is submitted meanwhile waits together
        futures = [service.submit([request]) for request in requests]
        counted = service.submit([HELLO], "count")
        rendered = service.submit([chat("<{{ messages[0].content }}>"), chat("{{ raise_exception('no') }}")], "render")
        deadly = service.submit([chat(ENDLESS)])
        more = [service.submit([request]) for request in requests[:20]]
    assert [Prepared(answer) for future in futures for answer in future.result(60)] == expected
    assert counted.result(60) == [2]
    text, refused = rendered.result(60)
    assert text == "<Hi>" and refused.code == "template_error"
    assert [answer.code for answer in deadly.result(60)] == ["text_time_limit"]
    assert [Prepared(answer) for future in more for answer in future.result(60)] == expected[:20]
    assert service._num_jobs - jobs_before < len(requests)


@contextlib.contextmanager
def stopped(service):
    service.count([HELLO])  # it runs
    os.kill(service.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(service.pid, signal.SIGCONT)
