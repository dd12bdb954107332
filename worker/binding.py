"""Ties a plan to memory: names become the numbers and offsets that C checks once and then runs on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from coremill.config.errors import EngineError
from coremill.native.mapping import SharedMap, map_weights
from coremill.worker.plan import ACT, OUTPUTS, Op, Plan
from coremill.worker.rotary import inverse_frequencies, magnitude

if TYPE_CHECKING:
    from coremill.native.arena import ArenaMap
    from coremill.native.packfile import PackFile


class BoundEngine:
    """A `cm_engine` and everything it points into, alive until `close`."""

    def __init__(self, engine: Any, weights: SharedMap, keep: list[Any], lib: Any) -> None:
        self.engine = engine
        self._weights = weights
        self._keep = keep
        self._lib = lib

    def close(self) -> None:
        if self.engine is not None:
            self._lib.cm_engine_destroy(self.engine)
            self.engine = None
            self._weights.close()
            self._keep.clear()


def bind(
    pack: PackFile,
    plan: Plan,
    arena: ArenaMap,
    *,
    max_step_tokens: int,
    max_sequences: int,
    threads: int,
    cores: Sequence[int],
    progress: Any,
    profile: bool,
    all_logits: bool,
) -> BoundEngine:
    """Map the weights and make the engine; arguments as of `WorkerModel`.

    Raises:
        EngineError: plan, pack and arena do not fit together, or memory or threads cannot be had.
    """
    from coremill.native import ffi, lib

    _check_geometry(pack, arena)
    weights = map_weights(pack)
    try:
        config, keep = _configure(pack, plan, weights.pointer(), arena, max_step_tokens, max_sequences)
        config.all_logits, config.profile, config.threads = all_logits, profile, threads
        if cores:
            config.cores = _array(ffi, keep, "int32_t[]", _cores(cores, threads))
        if progress is not None:
            config.progress = ffi.from_buffer("uint64_t[]", progress, require_writable=True)
            keep.append((progress, config.progress))
        err = ffi.new("char[]", 512)
        engine = lib.cm_engine_create(config, err, len(err))
        if engine == ffi.NULL:
            raise EngineError(f"{pack.path}: {ffi.string(err).decode(errors='replace')}")
    except BaseException:
        weights.close()
        raise
    return BoundEngine(engine, weights, keep, lib)


def scratch_bytes(pack: PackFile, plan: Plan, *, max_step_tokens: int, max_sequences: int, threads: int = 1) -> int:
    """`WorkerModel.scratch_bytes` of a worker, without making one; the weights are not read.

    Raises:
        EngineError: no engine can be made of this plan and pack.
    """
    from coremill.config.arena import ArenaGeometry
    from coremill.native import ffi, lib
    from coremill.native.arena import create_arena, map_arena

    geometry = ArenaGeometry.for_model(pack.spec, 1)
    fd = create_arena(geometry)
    try:
        with map_arena(fd, geometry) as arena:
            weights = ffi.from_buffer("uint8_t[]", pack.data(0, pack.data_length))
            config, _keep = _configure(pack, plan, weights, arena, max_step_tokens, max_sequences)
            config.threads = threads
            err = ffi.new("char[]", 512)
            needed = lib.cm_engine_scratch_needed(config, err, len(err))
    finally:
        os.close(fd)
    if not needed:
        raise EngineError(f"{pack.path}: {ffi.string(err).decode(errors='replace')}")
    return needed


def _configure(
    pack: PackFile, plan: Plan, weights: Any, arena: ArenaMap, max_step_tokens: int, max_sequences: int
) -> tuple[Any, list[Any]]:
    """A `cm_engine_config` that lacks threads and cores, and what keeps its pointers alive."""
    from coremill.native import ffi, lib

    config = ffi.new("cm_engine_config *")
    keep: list[Any] = [config, arena]
    config.weights, config.weights_len = weights, pack.data_length
    _set_plan(ffi, lib, config, keep, pack, plan)
    _set_rope(ffi, config, keep, pack)
    spec, geometry = pack.spec, arena.geometry
    config.vocab_size, config.max_positions = spec.vocab_size, min(spec.context_length, 1 << 30)
    config.max_step_tokens, config.max_sequences = max_step_tokens, max_sequences
    config.arena, config.arena_len = arena.pointer(), arena.length
    config.num_blocks, config.num_layers = geometry.num_blocks, geometry.num_layers
    config.num_kv_heads, config.head_dim = geometry.num_kv_heads, geometry.head_dim
    config.kv_type = lib.cm_kv_type(geometry.kv_type.encode())
    if lib.cm_kv_head_bytes(config.kv_type, geometry.head_dim) != geometry.head_bytes:
        raise EngineError(f"arena: {geometry.head_bytes} bytes a head of {geometry.kv_type} are not the kernels' size")
    return config, keep


def _check_geometry(pack: PackFile, arena: ArenaMap) -> None:
    for name in ("num_layers", "num_kv_heads", "head_dim"):
        ours, theirs = getattr(arena.geometry, name), getattr(pack.spec, name)
        if ours != theirs:
            raise EngineError(f"arena: {name} is {ours}, but the model's is {theirs}")


def _cores(cores: Sequence[int], threads: int) -> Sequence[int]:
    if len(cores) != threads:
        raise EngineError(f"{threads} threads on {len(cores)} cores: give one core to each thread")
    return cores


def _array(ffi: Any, keep: list[Any], kind: str, values: Sequence[Any]) -> Any:
    made = ffi.new(kind, values)
    keep.append(made)
    return made


def _set_plan(ffi: Any, lib: Any, config: Any, keep: list[Any], pack: PackFile, plan: Plan) -> None:
    buffers = {name: i for i, name in enumerate(plan.buffers)}
    matrices = {name: i for i, name in enumerate(plan.matrices())}
    vectors = {name: i for i, name in enumerate(plan.vectors())}
    for name in [*(m for m in matrices if m not in pack.matrices), *(v for v in vectors if v not in pack.vectors)]:
        raise EngineError(f"{pack.path}: the plan needs '{name}', which is not packed")
    config.buffers = _array(
        ffi,
        keep,
        "cm_buffer[]",
        [
            (
                lib.CM_BUFFER_ACT if b.kind == ACT else lib.CM_BUFFER_ROWS,
                lib.CM_SPACE_OUTPUTS if b.space == OUTPUTS else lib.CM_SPACE_TOKENS,
                b.width,
            )
            for b in plan.buffers.values()
        ],
    )
    packed = [pack.matrices[name] for name in matrices]
    config.matrices = _array(ffi, keep, "cm_matrix_ref[]", [(m.n, m.k, m.num_panels, m.panels_offset) for m in packed])
    config.vectors = _array(
        ffi, keep, "cm_vector_ref[]", [(v.offset, v.length) for v in (pack.vectors[name] for name in vectors)]
    )
    config.ops = _array(ffi, keep, "cm_op[]", [_op(lib, op, buffers, matrices, vectors) for op in plan.ops])
    config.num_ops, config.num_buffers = len(plan.ops), len(buffers)
    config.num_matrices, config.num_vectors = len(matrices), len(vectors)


def _op(lib: Any, op: Op, buffers: dict[str, int], matrices: dict[str, int], vectors: dict[str, int]) -> dict[str, Any]:
    return {
        "kind": getattr(lib, f"CM_OP_{op.kind.upper()}"),
        "dst": -1 if op.dst is None else buffers[op.dst],
        "src": -1 if op.src is None else buffers[op.src],
        "matrix": -1 if op.matrix is None else matrices[op.matrix],
        "bias": -1 if op.bias is None else vectors[op.bias],
        "vector": -1 if op.vector is None else vectors[op.vector],
        "epilogue": getattr(lib, f"CM_GEMM_{op.epilogue.upper()}"),
        "layer": op.layer,
        "column": op.columns,
        "heads": op.heads,
        "factor": op.factor,
        "rope": op.rope,
        "window": op.window,
    }


def _set_rope(ffi: Any, config: Any, keep: list[Any], pack: PackFile) -> None:
    rope, local, factors = pack.spec.rope, pack.spec.local_rope, None
    if rope.has_factors:
        vector = pack.vectors["rope_factors"]
        factors = pack.data(vector.offset, 4 * vector.length).cast("f").tolist()
    config.rope_dim = rope.dim
    config.rope_pairing = {"norm": 0, "neox": 1}[rope.pairing]
    config.inv_freq = [
        _array(ffi, keep, "double[]", inverse_frequencies(rope, factors)),
        _array(ffi, keep, "double[]", inverse_frequencies(local)) if local else ffi.NULL,
    ]
    config.rope_magnitude = [magnitude(rope), magnitude(local) if local else 1.0]
