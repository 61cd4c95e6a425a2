#include "gateway/traceparent.h"

#include <string.h>

static const char digits[] = "0123456789abcdef"; /* in lower case only */

/* `count` digits that are not all zeros. */
static bool is_id(const char *text, size_t count)
{
    return strspn(text, digits) >= count && strspn(text, "0") < count;
}

bool gw_traceparent_read(gw_trace *out, const char *header)
{
    /* VERSION-TRACE-PARENT-FLAGS; later versions may add to it behind another dash. */
    *out = (gw_trace){0};
    size_t length = header ? strlen(header) : 0;
    if (length < 55 || header[2] != '-' || header[35] != '-' || header[52] != '-')
        return false;
    bool known = memcmp(header, "00", 2) == 0;
    if (strspn(header, digits) != 2 || memcmp(header, "ff", 2) == 0 || !is_id(header + 3, 32) ||
        !is_id(header + 36, 16) || strspn(header + 53, digits) < 2)
        return false;
    if (length > 55 && (known || header[55] != '-'))
        return false;
    memcpy(out->id, header + 3, GW_TRACE_ID_MAX);
    memcpy(out->parent, header + 36, GW_SPAN_ID_MAX);
    out->sampled = strchr("13579bdf", header[54]) != NULL;
    return true;
}
