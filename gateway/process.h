/* gw_process: what the system says of this process. Thread: any; reads /proc. */
#pragma once
#include <stdint.h>

typedef struct gw_process {
    double cpu_seconds;                       /* user and system */
    uint64_t memory_bytes, memory_peak_bytes; /* resident */
    uint64_t virtual_bytes;
    uint32_t threads, cores; /* cores: that it may run on */
    uint32_t descriptors, descriptors_max;
} gw_process;

/* Zeros where the system does not say. */
gw_process gw_process_look(void);
