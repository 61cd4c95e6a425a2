/* kernels/module: backends that come as a shared object, whimbrel-NAME.so, with one exported symbol
 * (kernels/backend.h). */
#pragma once
#include "kernels/backend.h"

/* Looks into `folder` (NULL: nowhere), the program's own folder and its kernels/, and the folder
 * where modules are installed, in this order. *out lives as long as the process. Fails:
 * BASE_UNSUPPORTED: there is no such module, it cannot be loaded (a library of the GPU's is
 * missing: the loader's words), or it serves another version. Thread: any. */
base_code kn_module_open(const kn_backend **out, const char *name, const char *folder,
                         base_err *err);
