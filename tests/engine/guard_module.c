/* The guarded memory as a module, for tests of loading one: whimbrel-hip.so in a folder of theirs.
 */
#include "tests/engine/guard_backend.h"

kn_backend_get_fn kn_backend_get;

const kn_backend *kn_backend_get(uint32_t version)
{
    return version == KN_BACKEND_VERSION ? &guard_backend : NULL;
}
