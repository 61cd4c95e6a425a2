/* cpu/table: one vector variant's operations. */
#include "kernels/cpu/variant.h"

#ifdef KN_VARIANT_AVX512
#define NAME "cpu-avx512"
#else
#define NAME "cpu-avx2"
#endif

const kn_ops VN(kn_cpu_ops) = {
    .name = NAME,
    .embed = cpu_embed,
    .norm = cpu_norm,
    .head_norm_rope = cpu_head_norm_rope,
    .linear = cpu_linear,
    .attn_in = cpu_attn_in,
    .select = cpu_select,
    .attend = cpu_attend,
    .mlp = cpu_mlp,
    .moe = cpu_moe,
    .head = cpu_head,
    .kv_put = cpu_kv_put,
    .draft_attend = cpu_draft_attend,
};
