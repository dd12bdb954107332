/* AVX2 with FMA, F16C and BMI2: the baseline of every machine worth running on. */
#include "v16_avx2.h"

#include "gemm_ymm.h"
#include "gemm_dot_avx2.h"
#include "gemm_pack_avx.h"
#include "gemm_tile.inc"

#include "gemm_driver.inc"
#include "ops.inc"
#include "dot_avx2.h"
#include "kv_store.inc"
#include "attention.inc"

const cm_kernels cm_kernels_avx2 = {
    .name = "avx2",
    .act_pack = act_pack,
    .gemm = gemm,
    .gather_rows = cm_gather_rows,
    .dot_rounds = dot_rounds,
    CM_FLOAT_KERNELS,
};
