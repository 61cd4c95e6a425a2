/* kernels/table: which backend serves a device, by name or by what the processor has. */
#include "kernels/cpu/device.h"

#include <string.h>

static bool has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
}

static bool has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
}

static bool has_all(void)
{
    return true;
}

/* Best first: "auto" takes the first that the processor has. */
static const struct backend {
    const char *name;
    const kn_ops *ops;
    bool (*supports)(void);
    const char *wants;
} backends[] = {
    {"avx512", &kn_cpu_ops_avx512, has_avx512, "AVX-512 F, BW, VL, DQ, VBMI and VNNI"},
    {"avx2", &kn_cpu_ops_avx2, has_avx2, "AVX2, FMA and F16C"},
    {"ref", &kn_cpu_ops_ref, has_all, ""},
};

base_code kn_device_create(kn_device **out, const kn_device_options *options, base_err *err)
{
    const char *variant = options->variant ? options->variant : "auto";
    const bool any = strcmp(variant, "auto") == 0;
    for (size_t i = 0; i < sizeof backends / sizeof *backends; i++) {
        const struct backend *b = &backends[i];
        if (!any && strcmp(variant, b->name) != 0)
            continue;
        if (b->supports())
            return kn_cpu_device_create(out, b->ops, options, err);
        if (!any)
            return base_fail(err, BASE_UNSUPPORTED, "variant %s: this processor lacks one of %s",
                             b->name, b->wants);
    }
    return base_fail(err, BASE_UNSUPPORTED,
                     "variant \"%s\" unknown; there are auto, ref, avx2 and avx512", variant);
}
