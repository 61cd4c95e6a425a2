/* base/clock: time. Modules that must be exact in tests take a clock value as an argument instead.
 * Thread: any. */
#pragma once
#include <stdint.h>

uint64_t base_now_ns(void); /* monotonic */
int64_t base_wall_ms(void); /* Unix time in milliseconds */
