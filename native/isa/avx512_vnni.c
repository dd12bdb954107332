/* AVX-512 F, BW, VL, DQ and VNNI. */
#include "v16_avx512.h"

#include "gemm_avx512.h"
#include "gemm_pack_avx.h"
#include "gemm_tile.inc"

#include "gemm_driver.inc"
#include "ops.inc"
#include "dot_avx512.h"
#include "kv_store.inc"
#include "attention.inc"

const cm_kernels cm_kernels_avx512_vnni = {
    .name = "avx512_vnni",
    .act_pack = act_pack,
    .gemm = gemm,
    .gather_rows = cm_gather_rows,
    .dot_rounds = dot_rounds,
    CM_FLOAT_KERNELS,
};
