"""The engine below WorkerModel: every configuration and batch it must refuse, and its threads."""

import os
import threading
import time

import numpy as np
import pytest

from coremill.config.errors import EngineError
from coremill.native import ffi, lib

VOCAB, HIDDEN, HEAD_DIM, BLOCKS = 40, 32, 8, 4
ROWS, ACT = lib.CM_BUFFER_ROWS, lib.CM_BUFFER_ACT
TOKENS, OUTPUTS = lib.CM_SPACE_TOKENS, lib.CM_SPACE_OUTPUTS


def aligned(num_bytes: int) -> np.ndarray:
    raw = np.zeros(num_bytes + 64, np.uint8)
    skip = -raw.ctypes.data % 64
    return raw[skip : skip + num_bytes]


class Parts:
    """A one-layer model in plain memory: embed, norm, attention, head. Fields are changed before `create`."""

    def __init__(self) -> None:
        rng = np.random.default_rng(5)
        self.weights = aligned(1 << 16)
        self.used = 4096
        self.matrices = [self._matrix(rng, VOCAB), self._matrix(rng, 3 * HIDDEN)]
        self.vectors = [self._vector(np.ones(HIDDEN, np.float32)), self._vector(np.zeros(96, np.float32))]
        self.buffers = [
            [ROWS, TOKENS, HIDDEN],  # 0 x
            [ROWS, TOKENS, HIDDEN],  # 1 norm
            [ACT, TOKENS, HIDDEN],  # 2
            [ROWS, TOKENS, 3 * HIDDEN],  # 3 qkv
            [ROWS, TOKENS, HIDDEN],  # 4 attention
            [ROWS, OUTPUTS, HIDDEN],  # 5
            [ACT, OUTPUTS, HIDDEN],  # 6
        ]
        heads = {"column": [0, HIDDEN], "heads": [4, 4]}
        self.ops = {
            "embed": {"kind": lib.CM_OP_EMBED, "dst": 0, "matrix": 0, "factor": 1.0},
            "table": {"kind": lib.CM_OP_ROPE_TABLE},
            "norm": {"kind": lib.CM_OP_RMSNORM, "dst": 1, "src": 0, "vector": 0, "factor": 1e-5},
            "pack": {"kind": lib.CM_OP_ACT_PACK, "dst": 2, "src": 1},
            "qkv": {"kind": lib.CM_OP_GEMM, "dst": 3, "src": 2, "matrix": 1, "bias": 1},
            "rope": {"kind": lib.CM_OP_ROPE, "dst": 3, **heads},
            "store": {"kind": lib.CM_OP_KV_STORE, "src": 3, "layer": 0, "column": [HIDDEN, 2 * HIDDEN]},
            "attention": {"kind": lib.CM_OP_ATTENTION, "dst": 4, "src": 3, "layer": 0, **heads, "factor": 0.3},
            "gather": {"kind": lib.CM_OP_GATHER_OUT, "dst": 5, "src": 4},
            "out_pack": {"kind": lib.CM_OP_ACT_PACK, "dst": 6, "src": 5},
            "head": {"kind": lib.CM_OP_HEAD, "src": 6, "matrix": 0},
            "sample": {"kind": lib.CM_OP_SAMPLE},
        }
        self.arena = aligned(BLOCKS * 4 * HEAD_DIM * 128)
        self.numbers = {
            "weights_len": len(self.weights),
            "vocab_size": VOCAB,
            "max_positions": 100,
            "max_step_tokens": 16,
            "max_sequences": 4,
            "arena_len": len(self.arena),
            "num_blocks": BLOCKS,
            "num_layers": 1,
            "num_kv_heads": 4,
            "head_dim": HEAD_DIM,
            "rope_dim": HEAD_DIM,
            "rope_pairing": 1,
            "rope_magnitude": [1.0, 1.0],
            "threads": 1,
        }
        self.inv_freq = [1.0, 0.1, 0.01, 0.001]
        self.cores = None

    def _take(self, data: np.ndarray) -> int:
        begin = self.used
        raw = data.view(np.uint8).reshape(-1)
        self.weights[begin : begin + len(raw)] = raw
        self.used += -(-len(raw) // 64) * 64
        return begin

    def _matrix(self, rng, n: int) -> list[int]:
        """Float panels [k][16] and, in the first 4 KiB, their table."""
        panels, table = -(-n // 16), np.zeros((8, 2), np.uint64)
        offset = self._take(rng.standard_normal((panels, HIDDEN, 16)).astype(np.float32))
        for i in range(panels):
            table[i, 0] = offset + i * HIDDEN * 64
        where = 128 * (n // 30)
        self.weights[where : where + 16 * panels] = table.view(np.uint8).reshape(-1)[: 16 * panels]
        return [n, HIDDEN, panels, where]

    def _vector(self, values: np.ndarray) -> list[int]:
        return [self._take(values), len(values)]

    def panel(self, matrix: int, panel: int) -> np.ndarray:
        """Words of a panel's entry: offset, then format."""
        begin = self.matrices[matrix][3] + 16 * panel
        return self.weights[begin : begin + 16].view(np.uint32)

    def create(self):
        """The engine, as a cffi pointer that destroys it; EngineError with C's message."""
        none = {"dst": -1, "src": -1, "matrix": -1, "bias": -1, "vector": -1}
        keep = {
            "ops": ffi.new("cm_op[]", [{**none, **op} for op in self.ops.values()]),
            "buffers": ffi.new("cm_buffer[]", self.buffers),
            "matrices": ffi.new("cm_matrix_ref[]", self.matrices),
            "vectors": ffi.new("cm_vector_ref[]", self.vectors),
            "inv_freq": [ffi.new("double[]", self.inv_freq), ffi.NULL],
            "cores": ffi.NULL if self.cores is None else ffi.new("int32_t[]", self.cores),
        }
        counts = {f"num_{k}": len(getattr(self, k)) for k in ("ops", "buffers", "matrices", "vectors")}
        config = ffi.new("cm_engine_config *", {**counts, **self.numbers, **keep})
        config.weights = ffi.cast("uint8_t *", self.weights.ctypes.data)
        config.arena = ffi.cast("uint8_t *", self.arena.ctypes.data)
        err = ffi.new("char[]", 300)
        engine = lib.cm_engine_create(config, err, len(err))
        if engine == ffi.NULL:
            raise EngineError(ffi.string(err).decode())
        return ffi.gc(engine, lib.cm_engine_destroy)


@pytest.fixture
def parts() -> Parts:
    return Parts()


def good_batch() -> dict:
    """Two sequences of 3 and 2 rows, a token after each."""
    return {
        "num_rows": 5,
        "num_seqs": 2,
        "tokens": [1, 2, 3, 4, 5],
        "seq_row": [0, 3, 5],
        "seq_pos": [0, 31],
        "block_begin": [0, 1, 3],
        "blocks": [2, 0, 1],
        "sampling": [{"wanted": 1, "top_p": 1.0}, {"wanted": 1, "temperature": 1.0, "top_p": 1.0}],
    }


def step(engine, **changes) -> list[tuple[int, int]]:
    fields = {**good_batch(), **changes}
    types = {"sampling": "cm_sampling[]"}
    keep = {k: ffi.new(types.get(k, "int32_t[]"), v) for k, v in fields.items() if isinstance(v, list)}
    batch = ffi.new("cm_batch *", {**fields, **keep})
    results, err = ffi.new("cm_step_result[16]"), ffi.new("char[]", 300)
    count = lib.cm_engine_step(engine, batch, results, err, len(err))
    if count < 0:
        raise EngineError(ffi.string(err).decode())
    return [(results[i].token, results[i].status) for i in range(count)]


def test_the_model_of_these_tests_works(parts):
    engine = parts.create()
    outs = step(engine)
    assert len(outs) == 2 and all(0 <= token < VOCAB and status == lib.CM_SAMPLE_OK for token, status in outs)
    assert step(engine) == outs
    assert lib.cm_engine_scratch_bytes(engine) % (2 << 20) == 0


CONFIG_FAULTS = {
    "threads is 0": lambda p: p.numbers.update(threads=0),
    "threads is 2000": lambda p: p.numbers.update(threads=2000),
    "vocab_size is 0": lambda p: p.numbers.update(vocab_size=0),
    "max_step_tokens is 0": lambda p: p.numbers.update(max_step_tokens=0),
    "max_sequences is 17, not 1 to 16": lambda p: p.numbers.update(max_sequences=17),
    "max_positions is -1": lambda p: p.numbers.update(max_positions=-1),
    "head_dim is 12, not a multiple": lambda p: p.numbers.update(head_dim=12),
    "head_dim is 264": lambda p: p.numbers.update(head_dim=264),
    "rope_dim is 10, not 2 to 8": lambda p: p.numbers.update(rope_dim=10),
    "rope_dim is 3, not even": lambda p: p.numbers.update(rope_dim=3),
    "rope_pairing": lambda p: p.numbers.update(rope_pairing=2),
    "rope_magnitude": lambda p: p.numbers.update(rope_magnitude=[float("nan"), 1.0]),
    r"inv_freq\[0\]\[2\] is 1.5": lambda p: p.inv_freq.__setitem__(2, 1.5),
    r"inv_freq\[0\]\[0\] is -?nan": lambda p: p.inv_freq.__setitem__(0, float("nan")),
    "does not hold 5 blocks": lambda p: p.numbers.update(num_blocks=5),
    "does not hold 2147483647 blocks": lambda p: p.numbers.update(num_blocks=2**31 - 1),
    "num_layers is 0": lambda p: p.numbers.update(num_layers=0),
    "weights and arena must start": lambda p: setattr(p, "weights", p.weights[1:]),
    "core -1": lambda p: setattr(p, "cores", [-1]),
    "buffer 3: kind 7": lambda p: p.buffers[3].__setitem__(0, 7),
    "buffer 3: kind 0, space 2": lambda p: p.buffers[3].__setitem__(1, 2),
    "width 0": lambda p: p.buffers[3].__setitem__(2, 0),
    "matrix 0: 3 panels of 49": lambda p: p.matrices[0].__setitem__(0, 49),
    "matrix 1: 6 panels of 96 x -32": lambda p: p.matrices[1].__setitem__(1, -32),
    "matrix 1: its table": lambda p: p.matrices[1].__setitem__(3, 1 << 16),
    "matrix 1: its table of": lambda p: p.matrices[1].__setitem__(3, 2**64 - 8),
    "matrix 0, panel 2: unknown format 5": lambda p: p.panel(0, 2).__setitem__(2, 5),
    "matrix 0, panel 1: k 32 is not a multiple of 256": lambda p: p.panel(0, 1).__setitem__(2, 12),
    "matrix 1, panel 5: not inside": lambda p: p.panel(1, 5).__setitem__(0, 65536 - 1024),
    "matrix 1, panel 4: not inside": lambda p: p.panel(1, 4).__setitem__(0, 8192 + 32),
    "matrix 1, panel 0: not inside": lambda p: p.panel(1, 0).__setitem__(1, 1),
    "vector 0: 32 floats": lambda p: p.vectors[0].__setitem__(0, 65536 - 64),
    "vector 1: 0 floats": lambda p: p.vectors[1].__setitem__(1, 0),
    "operation 0: unknown kind 99": lambda p: p.ops["embed"].update(kind=99),
    "operation 0: matrix 2 is no embedding": lambda p: p.ops["embed"].update(matrix=2),
    "operation 0: buffer 7 of 7": lambda p: p.ops["embed"].update(dst=7),
    "operation 0: buffer 2 is of the wrong kind": lambda p: p.ops["embed"].update(dst=2),
    "operation 0: matrix 0 is no embedding of 41": lambda p: p.numbers.update(vocab_size=41),
    "operation 2: vector 1 is no weight": lambda p: p.ops["norm"].update(vector=1),
    "operation 2: epsilon -1": lambda p: p.ops["norm"].update(factor=-1.0),
    "operation 2: buffer -1 of 7": lambda p: p.ops["norm"].update(src=-1),
    "operation 3: 64 inputs from rows of 32": lambda p: p.buffers[2].__setitem__(2, 64),
    "operation 4: matrix 1 takes 32 inputs, buffer 6": lambda p: (
        p.buffers[6].__setitem__(2, 48),
        p.ops["qkv"].update(src=6),
    ),
    "operation 4: matrix -1 of 2": lambda p: p.ops["qkv"].update(matrix=-1),
    "operation 4: bias 0 is not a vector of 96": lambda p: p.ops["qkv"].update(bias=0),
    "operation 4: epilogue 4": lambda p: p.ops["qkv"].update(epilogue=4),
    "operation 4: matrix 1 gives 96 outputs, buffer 0 has 32": lambda p: p.ops["qkv"].update(dst=0),
    "operation 4: matrix 1 gives 48 outputs": lambda p: p.ops["qkv"].update(epilogue=2, dst=0),
    "operation 5: 4 heads from column 72": lambda p: p.ops["rope"].update(column=[0, 72]),
    "operation 5: 0 heads": lambda p: p.ops["rope"].update(heads=[4, 0]),
    "operation 5: 2147483647 heads": lambda p: p.ops["rope"].update(heads=[2**31 - 1, 4]),
    "operation 5: table 1 of rotary positions": lambda p: p.ops["rope"].update(rope=1),
    "operation 5: table -1 of": lambda p: p.ops["rope"].update(rope=-1),
    "operation 5: vector 0 is no weight for heads of 8": lambda p: p.ops["rope"].update(
        kind=lib.CM_OP_HEAD_NORM, vector=0
    ),
    "operation 3: rows cannot be added to themselves": lambda p: p.ops["pack"].update(
        kind=lib.CM_OP_NORM_ADD, src=1, dst=1, vector=0
    ),
    "operation 7: window -1": lambda p: p.ops["attention"].update(window=-1),
    "operation 6: layer 1 of 1": lambda p: p.ops["store"].update(layer=1),
    "operation 6: 4 heads from column -8": lambda p: p.ops["store"].update(column=[-8, 0]),
    "operation 7: 6 heads over 4 KV heads": lambda p: p.ops["attention"].update(heads=[6, 0]),
    "operation 7: 8 heads over 4 KV heads into rows of 32": lambda p: p.ops["attention"].update(heads=[8, 0]),
    "operation 7: attention cannot overwrite": lambda p: p.ops["attention"].update(dst=3),
    "operation 8: buffer 0 is of the wrong kind": lambda p: p.ops["gather"].update(dst=0),
    "operation 8: rows of 96 into rows of 32": lambda p: p.ops["gather"].update(src=3),
    "operation 10: 96 logits for a vocabulary of 40": lambda p: p.ops["head"].update(matrix=1),
    "operation 10: buffer 2 is of the wrong kind": lambda p: p.ops["head"].update(src=2),
}


@pytest.mark.parametrize("message", CONFIG_FAULTS)
def test_faulty_configurations(parts, message):
    CONFIG_FAULTS[message](parts)
    with pytest.raises(EngineError, match=message):
        parts.create()


BATCH_FAULTS = {
    "0 rows, not 1 to 16": {"num_rows": 0},
    "17 rows": {"num_rows": 17},
    "0 sequences": {"num_seqs": 0},
    "5 sequences, not 1 to 4": {"num_seqs": 5},
    "sequence 0 starts at row 1 of 5": {"seq_row": [1, 3, 5]},
    "sequence 1 starts at row 5 of 5": {"seq_row": [0, 5, 5]},
    "sequence 1 starts at row -2147483648": {"seq_row": [0, -(2**31), 5]},
    "sequence 2 starts at row 4 of 5": {"seq_row": [0, 3, 4]},
    "sequence 1 has no rows": {"num_seqs": 3, "seq_row": [0, 3, 3, 5]},
    "row 4: token 40 of 40": {"tokens": [1, 2, 3, 4, 40]},
    "row 0: token -1 of 40": {"tokens": [-1, 2, 3, 4, 5]},
    "sequence 0: positions -1": {"seq_pos": [-1, 31]},
    r"sequence 1: positions 99 \+ 2, limit 100": {"seq_pos": [0, 99]},
    r"sequence 1: positions 2147483647 \+ 2": {"seq_pos": [0, 2**31 - 1]},
    "sequence 1: 1 blocks, needs 2": {"block_begin": [0, 1, 2]},
    "sequence 0: -1 blocks": {"block_begin": [1, 0, 3]},
    "sequence 0: 2 blocks, needs 1": {"block_begin": [-1, 1, 3]},
    "sequence 0: block 4 of 4": {"blocks": [4, 0, 1]},
    "sequence 1: block -1 of 4": {"blocks": [2, 0, -1]},
    "sequence 0: top_p": {"sampling": [{"wanted": 1, "temperature": 1.0}, {}]},
    "not made for all logits": {"all_logits": 1},
}


@pytest.mark.parametrize("message", BATCH_FAULTS)
def test_faulty_batches_change_nothing(parts, message):
    engine = parts.create()
    before, arena = step(engine), parts.arena.tobytes()
    with pytest.raises(EngineError, match=message):
        step(engine, **BATCH_FAULTS[message])
    assert parts.arena.tobytes() == arena
    assert step(engine) == before


def test_parameters_of_unwanted_samples_are_ignored(parts):
    sampling = [{"wanted": 0, "temperature": -5.0}, {"wanted": 1, "top_p": 1.0}]
    assert len(step(parts.create(), sampling=sampling)) == 1


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_threads_give_the_same_and_leave(parts, threads):
    alone = step(parts.create())
    before = threading.active_count(), len(os.listdir("/proc/self/task"))
    parts.numbers.update(threads=threads)
    engine = parts.create()
    assert len(os.listdir("/proc/self/task")) == before[1] + threads - 1
    assert all(step(engine) == alone for _ in range(20))
    del engine
    deadline = time.monotonic() + 5
    while len(os.listdir("/proc/self/task")) > before[1] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/task")) == before[1]


def test_idle_threads_use_no_cpu(parts):
    parts.numbers.update(threads=4)
    engine = parts.create()
    step(engine)
    time.sleep(0.05)
    begun = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - begun < 0.1  # threads that spin would use 1.5 s
    assert step(engine)


def test_helper_threads_sit_on_their_cores(parts):
    core = min(os.sched_getaffinity(0))
    before = set(os.listdir("/proc/self/task"))
    parts.numbers.update(threads=2)
    parts.cores = [core, core]
    engine = parts.create()
    (helper,) = set(os.listdir("/proc/self/task")) - before
    assert os.sched_getaffinity(int(helper)) == {core}
    assert step(engine)
    parts.cores = [0, 1 << 19]
    with pytest.raises(EngineError, match="starting thread 1 on CPU 524288"):
        parts.create()
