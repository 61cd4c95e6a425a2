/* kernels/table: which backend serves a device, by name or by what the processor has. */
#include "kernels/cpu/device.h"

#include <string.h>

#define AVX2 (KN_CPU_AVX2 | KN_CPU_FMA | KN_CPU_F16C)
#define AVX512                                                                                     \
    (AVX2 | KN_CPU_AVX512F | KN_CPU_AVX512BW | KN_CPU_AVX512VL | KN_CPU_AVX512DQ |                 \
     KN_CPU_AVX512VBMI | KN_CPU_AVX512VNNI)

/* By bit number. */
static const char *const feature_names[] = {"AVX2",       "FMA",          "F16C",
                                            "AVX-512 F",  "AVX-512 BW",   "AVX-512 VL",
                                            "AVX-512 DQ", "AVX-512 VBMI", "AVX-512 VNNI"};

/* Best first: "auto" takes the first that the processor has. */
static const struct backend {
    const char *name;
    const kn_ops *ops;
    uint32_t needs;
} backends[] = {
    {"avx512", &kn_cpu_ops_avx512, AVX512},
    {"avx2", &kn_cpu_ops_avx2, AVX2},
    {"ref", &kn_cpu_ops_ref, 0},
};

uint32_t kn_cpu_features(void)
{
    uint32_t features = 0;
    features |= __builtin_cpu_supports("avx2") ? KN_CPU_AVX2 : 0;
    features |= __builtin_cpu_supports("fma") ? KN_CPU_FMA : 0;
    features |= __builtin_cpu_supports("f16c") ? KN_CPU_F16C : 0;
    features |= __builtin_cpu_supports("avx512f") ? KN_CPU_AVX512F : 0;
    features |= __builtin_cpu_supports("avx512bw") ? KN_CPU_AVX512BW : 0;
    features |= __builtin_cpu_supports("avx512vl") ? KN_CPU_AVX512VL : 0;
    features |= __builtin_cpu_supports("avx512dq") ? KN_CPU_AVX512DQ : 0;
    features |= __builtin_cpu_supports("avx512vbmi") ? KN_CPU_AVX512VBMI : 0;
    features |= __builtin_cpu_supports("avx512vnni") ? KN_CPU_AVX512VNNI : 0;
    return features;
}

base_code kn_cpu_choose(const kn_ops **out, const char *variant, uint32_t features, base_err *err)
{
    const bool any = strcmp(variant, "auto") == 0;
    for (size_t i = 0; i < sizeof backends / sizeof *backends; i++) {
        const struct backend *b = &backends[i];
        const uint32_t missing = b->needs & ~features;
        if (!any && strcmp(variant, b->name) != 0)
            continue;
        if (missing == 0) {
            *out = b->ops;
            return BASE_OK;
        }
        if (!any)
            return base_fail(err, BASE_UNSUPPORTED, "variant %s: this processor lacks %s", b->name,
                             feature_names[__builtin_ctz(missing)]);
    }
    return base_fail(err, BASE_UNSUPPORTED,
                     "variant \"%s\" unknown; there are auto, ref, avx2 and avx512", variant);
}

base_code kn_device_create(kn_device **out, const kn_device_options *options, base_err *err)
{
    const kn_ops *ops;
    const base_code code =
        kn_cpu_choose(&ops, options->variant ? options->variant : "auto", kn_cpu_features(), err);
    return code ? code : kn_cpu_device_create(out, ops, options, err);
}
