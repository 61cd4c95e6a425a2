#include "kernels/module.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define NAME_MAX_LENGTH 16

/* The folder of the running program, or "." if the system does not say. */
static void own_folder(char out[PATH_MAX])
{
    ssize_t length = readlink("/proc/self/exe", out, PATH_MAX - 1);
    char *slash;
    out[length > 0 ? length : 0] = '\0';
    if ((slash = strrchr(out, '/')) != NULL)
        *slash = '\0';
    else
        strcpy(out, ".");
}

static base_code load(const kn_backend **out, const char *name, const char *path, base_err *err)
{
    void *module = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (module == NULL)
        return base_fail(err, BASE_UNSUPPORTED, "backend %s: %.150s", name, dlerror());
    kn_backend_get_fn *get;
    *(void **)&get = dlsym(module, KN_BACKEND_SYMBOL);
    const kn_backend *backend = get != NULL ? get(KN_BACKEND_VERSION) : NULL;
    if (backend != NULL && backend->version == KN_BACKEND_VERSION) {
        *out = backend; /* the module stays: devices and threads may come from it at any time */
        return BASE_OK;
    }
    dlclose(module);
    return base_fail(err, BASE_UNSUPPORTED,
                     get == NULL ? "backend %s: %.120s exports no " KN_BACKEND_SYMBOL
                                 : "backend %s: %.120s does not serve version %d",
                     name, path, KN_BACKEND_VERSION);
}

base_code kn_module_open(const kn_backend **out, const char *name, const char *folder,
                         base_err *err)
{
    char own[PATH_MAX], kernels[PATH_MAX + 8], path[PATH_MAX + 64];
    *out = NULL;
    if (name[0] == '\0' || strlen(name) > NAME_MAX_LENGTH ||
        strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789") != strlen(name))
        return base_fail(err, BASE_UNSUPPORTED, "backend \"%.32s\" is none of auto, cpu, cuda, hip",
                         name);
    own_folder(own);
    snprintf(kernels, sizeof kernels, "%s/kernels", own);
    const char *const folders[] = {folder, own, kernels, KN_MODULE_DIR};
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++) {
        if (folders[i] == NULL)
            continue;
        snprintf(path, sizeof path, "%s/whimbrel-%s.so", folders[i], name);
        if (access(path, F_OK) == 0)
            return load(out, name, path, err);
    }
    return base_fail(err, BASE_UNSUPPORTED, "backend %s: there is no whimbrel-%s.so in %.100s",
                     name, name, folder != NULL ? folder : KN_MODULE_DIR);
}
