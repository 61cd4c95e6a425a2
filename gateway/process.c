#include "gateway/process.h"

#include <dirent.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

static uint32_t count_entries(const char *path)
{
    uint32_t count = 0;
    DIR *folder = opendir(path);
    while (folder && readdir(folder))
        count++;
    if (folder)
        closedir(folder);
    return count > 2 ? count - 2 : 0; /* . and .. */
}

gw_process gw_process_look(void)
{
    gw_process out = {0};
    struct rusage usage;
    struct rlimit files;
    cpu_set_t set;
    unsigned long long total = 0, resident = 0;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    if (getrusage(RUSAGE_SELF, &usage) == 0) {
        out.cpu_seconds = (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
                          (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
        out.memory_peak_bytes = (uint64_t)usage.ru_maxrss * 1024;
    }
    FILE *file = fopen("/proc/self/statm", "re");
    if (file && fscanf(file, "%llu %llu", &total, &resident) == 2) {
        out.virtual_bytes = total * page;
        out.memory_bytes = resident * page;
    }
    if (file)
        fclose(file);
    out.threads = count_entries("/proc/self/task");
    out.descriptors = count_entries("/proc/self/fd");
    if (getrlimit(RLIMIT_NOFILE, &files) == 0)
        out.descriptors_max = files.rlim_cur > UINT32_MAX ? UINT32_MAX : (uint32_t)files.rlim_cur;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        out.cores = (uint32_t)CPU_COUNT(&set);
    return out;
}
